"""Which ports an agent reserves for its run, and when rank 0 gets them."""

from __future__ import annotations

from notebook_accel import wire
from notebook_accel.launch.agent.ports import RunPorts


def launch(*ranks: int, world_size: int) -> wire.Launch:
    specs = tuple(wire.RankSpec(rank=rank, local_rank=local) for local, rank in enumerate(ranks))
    return wire.Launch(
        world_size=world_size,
        ranks=specs,
        environment={},
        directory="/",
        path=(),
        log_dir=None,
        num_threads=1,
    )


def test_rank_0_gets_the_socket_once_and_again_after_another_port_was_taken() -> None:
    ports = RunPorts(launch(0, 1, world_size=2))
    first = ports.master_number
    assert first > 0
    assert ports.master_for_rank_0() is ports.master
    assert ports.master_for_rank_0() is None
    ports.renew_master()
    assert ports.master_number != first
    assert ports.master_for_rank_0() is ports.master
    assert ports.store is not None
    ports.close()
    ports.renew_master()
    assert (ports.master_number, ports.master_for_rank_0(), ports.store) == (0, None, None)


def test_a_rank_alone_leaves_the_port_to_its_children() -> None:
    ports = RunPorts(launch(0, world_size=1))
    assert ports.master_number > 0
    assert ports.master_for_rank_0() is None
    ports.close()


def test_only_the_agent_of_rank_0_reserves_a_port_where_there_are_several() -> None:
    first, second = (RunPorts(launch(rank, world_size=2)) for rank in (0, 1))
    assert first.master_number > 0
    assert second.master_number == 0
    assert first.store is second.store is None
    first.close()
