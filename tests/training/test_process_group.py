"""Groups that are made again and again meet anew each time, at a port that is the run's alone."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from notebook_accel import Accelerator, notebook_launcher
from notebook_accel.training.state import PartialState
from tests.ports import free_port
from tests.training.harness import run_ranks
from tests.training.single import forget_states
from tests.waiting import eventually

NOBODY = 65534
HOSTS = ("127.0.0.1", "0.0.0.0")


def await_files(folder, *names):
    eventually(
        lambda: all(Path(folder, name).exists() for name in names), within=60, what=str(names)
    )


def make_ours():
    PartialState(cpu=True)


def make_by_torch():
    dist.init_process_group("gloo")


def listens_on():
    """The addresses on which this process listens: of stores, and of gloo."""
    found = psutil.Process().net_connections("inet")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}


def remake(folder, times, make=make_ours):
    """Make and destroy a group; one rank is always early for the next, in turn."""
    rank = int(os.environ["RANK"])
    sums, addresses = [], set()
    for number in range(times):
        make()
        total = torch.tensor(float(rank + number))
        dist.all_reduce(total)
        sums.append(total.item())
        addresses |= listens_on()
        Path(folder, f"read-{number}-{rank}").touch()
        await_files(folder, f"read-{number}-0", f"read-{number}-1")
        if rank == number % 2:
            # The other has left, and asks for the next group while this one's store is there.
            await_files(folder, f"left-{number}-{1 - rank}")
            time.sleep(0.001 * (number % 5))
        dist.destroy_process_group()
        forget_states()
        Path(folder, f"left-{number}-{rank}").touch()
    return {"sums": sums, "addresses": addresses}


TIMES = 30
REMADE = {"sums": [2.0 * number + 1 for number in range(TIMES)], "addresses": {"127.0.0.1"}}


def test_a_group_that_is_made_again_never_meets_the_old_store(tmp_path):
    made = run_ranks(remake_at, 2, free_port(), str(tmp_path), timeout=100)
    assert made == [REMADE] * 2


def remake_at(port, folder):
    dist.destroy_process_group()
    del os.environ["GLOO_SOCKET_IFNAME"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return remake(folder, TIMES)


@pytest.mark.parametrize("make", [make_ours, make_by_torch])
def test_so_it_is_in_ranks_of_ours(tmp_path, make):
    run = notebook_launcher(remake, (str(tmp_path), TIMES, make), 2, view="none")
    assert list(run) == [REMADE] * 2


def ports_of_the_run():
    from notebook_accel.rank.this_rank import current

    store = current().store_port
    assert store
    return [int(os.environ["MASTER_PORT"]), store.port]


def tempt(folder):
    """What another user gets of the run's ports, before, in and after a group."""
    rank = int(os.environ["RANK"])
    ports = ports_of_the_run()
    taken = []
    for _ in range(2):
        for make in (make_ours, make_by_torch):
            taken.append(take_as_nobody(ports))
            make()
            taken.append(take_as_nobody(ports))
            dist.barrier()
            Path(folder, f"{len(taken)}-{rank}").touch()
            await_files(folder, f"{len(taken)}-0", f"{len(taken)}-1")
            dist.destroy_process_group()
            forget_states()
            taken.append(take_as_nobody(ports))
    return taken


def take_as_nobody(ports):
    """What a child with another user could listen on, of these ports."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(NOBODY)
            took = [f"{host}:{port}" for host in HOSTS for port in ports if takes(host, port)]
            os.write(theirs, " ".join(took).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def takes(host, port):
    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taker.bind((host, port))
            taker.listen()
        except OSError:
            return False
    return True


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed: run it as root")
@pytest.mark.parametrize("use_port", [None, "fixed"])
def test_another_user_cannot_take_the_ports_of_a_run(tmp_path, use_port):
    if use_port:
        use_port = free_port()
    run = notebook_launcher(tempt, (str(tmp_path),), 2, use_port=use_port, view="none")
    assert list(run) == [[""] * 12] * 2
    free = free_port()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free))
        assert take_as_nobody([free]) == "", free
    assert take_as_nobody([free]) != "", "else nothing was tried"


def plain(folder):
    """Plain functions make their groups by MASTER_ADDR and MASTER_PORT, in several ways."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    asked = {"rank": rank, "world_size": 2}
    ways = [
        dict,
        lambda: {**asked, "init_method": f"tcp://127.0.0.1:{port}"},
        lambda: {**asked, "store": dist.TCPStore("127.0.0.1", port, 2, rank == 0)},
    ]
    sums, addresses = [], set()
    for number, way in enumerate([*ways, *ways]):
        dist.init_process_group("gloo", **way())
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        sums.append(total.item())
        addresses |= listens_on()
        Path(folder, f"{number}-{rank}").touch()
        await_files(folder, f"{number}-0", f"{number}-1")
        dist.destroy_process_group()
        # A store that the function opens itself can be opened again only once it is gone.
        Path(folder, f"gone-{number}-{rank}").touch()
        await_files(folder, f"gone-{number}-0", f"gone-{number}-1")
    return {"sums": sums, "addresses": addresses}


SCRIPT = """
import atexit, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
def num_threads():
    names = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            names.append((thread / "comm").read_text())
        except OSError:
            pass  # it has ended
    return names.count("pt_gloo_runloop\\n")
def tell():
    deadline = time.monotonic() + 60
    # Threads that were waited for are listed for a moment still.
    while num_threads() and not dist.is_initialized() and time.monotonic() < deadline:
        time.sleep(0.01)
    print(dist.is_initialized(), num_threads())
atexit.register(tell)  # called after what is registered later
from notebook_accel import Accelerator
Accelerator(cpu=True).wait_for_everyone()
torch.optim.SGD(torch.nn.Linear(1, 1).parameters())  # imports torch._dynamo
if sys.argv[1] == "fails":
    raise ValueError("bad batch")
"""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ends", "stays"), [("well", "False 0"), ("fails", "True 2")])
def test_a_script_leaves_its_group_before_python_ends_unless_it_failed(ends, stays):
    """With threads of gloo that outlive the interpreter, a rank may abort at its very end."""
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, ends],
            env={**os.environ, **sizes, **meeting, "RANK": number, "LOCAL_RANK": number},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in ("0", "1")
    ]
    said = [rank.communicate(timeout=200) for rank in ranks]
    assert [out for out, _ in said] == [f"{stays}\n"] * 2, said
    assert [rank.returncode for rank in ranks] == [int(ends == "fails")] * 2, said


def drops_its_model_last():
    sys.setswitchinterval(60)  # a thread gets Python's lock only where this one waits
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    for _ in range(20):
        accelerator.gather(torch.ones(1000))
    accelerator.state.destroy_process_group()
    assert accelerator.num_processes == 2, "what was known stays"
    del model


def test_a_model_may_outlive_its_group():
    for _ in range(4):  # of which one hung, mostly
        notebook_launcher(drops_its_model_last, num_processes=2, view="none", timeout=60)


def test_plain_functions_make_and_destroy_groups_by_master_port(tmp_path):
    run = notebook_launcher(plain, (str(tmp_path),), 2, view="none")
    # Torch's own store would listen on all interfaces.
    assert list(run) == [{"sums": [1.0] * 6, "addresses": {"127.0.0.1"}}] * 2


def test_a_port_that_the_user_chose_serves_launch_after_launch():
    def meet():
        dist.init_process_group("gloo")
        total = torch.ones(())
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()

    port = free_port()
    for _ in range(3):
        assert list(notebook_launcher(meet, (), 2, use_port=port, view="none")) == [2.0, 2.0]
