"""From each rank's newest collectives to the first at which they differ."""

import msgspec
import pytest

from notebook_accel import wire
from notebook_accel.launch.control.hang import (
    HangWatch,
    RankStack,
    at_wait,
    differences,
    text_of_difference,
    waits,
)
from tests.notebook.states import after, running

CELL = "/tmp/ipykernel_1/1.py"
TORCH = "/env/lib/python3.11/site-packages/torch/distributed"
FIRST = "Collective 1 is all_reduce"
LINE = ", at Cell In[4], line 11"
SUM, SHARE, EACH, SPLIT = "all_reduce", "broadcast", "all_to_all", "scatter"


def answer(*begun, first=1, done=0, **groups):
    """Collectives from the number `first` on, as (operation, sizes), done up to `done`."""
    return wire.Collectives(
        begun=tuple(
            wire.Collective(
                group=groups.get("group", "0 nccl"),
                ranks=groups.get("ranks", ()),
                number=number,
                operation=operation,
                sizes=sizes,
                is_pending=number > done,
                frames=(
                    wire.Frame(f"{TORCH}/distributed_c10d.py", 9, operation),
                    wire.Frame(CELL, 10 + number, "f"),
                ),
            )
            for number, (operation, sizes) in enumerate(begun, first)
        )
    )


def stacks(num_ranks):
    return [
        RankStack(rank=rank, operation="", own_line="Cell In[4], line 30", is_idle=False)
        for rank in range(num_ranks)
    ]


def told(answers, num_ranks=2):
    found = differences(answers, num_ranks)
    return text_of_difference(found[0], stacks(num_ranks), {CELL: "Cell In[4]"}) if found else ""


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        # One never comes: also where it has begun none at all.
        (
            answer((SUM, "[3]"), (SUM, "[4]"), done=1),
            answer((SUM, "[3]"), done=1),
            "Collective 2 is all_reduce of [4] on rank 0; rank 1 has come to 1",
        ),
        (
            answer(("barrier", "[]")),
            answer(),
            "Collective 1 is barrier on rank 0; rank 1 has come to none",
        ),
        # Another operation: gloo's broadcast may be done where it was sent.
        (
            answer((SUM, "[1]")),
            answer((SHARE, "[1]"), (SUM, "[1]"), done=1),
            f"{FIRST} of [1] on rank 0{LINE}; broadcast of [1] on rank 1{LINE}",
        ),
        (
            answer((SUM, "[4]")),
            answer((SUM, "[8]")),
            f"{FIRST} of [4] on rank 0{LINE}; all_reduce of [8] on rank 1{LINE}",
        ),
        # All agree: what is done may have had several sizes, and some operations may always have.
        (answer((SUM, "[4]")), answer((SUM, "[4]")), ""),
        (answer(("all_gather", "[4]"), done=1), answer(("all_gather", "[8]"), done=1), ""),
        (answer((EACH, "[4]")), answer((EACH, "[8]")), ""),
        (answer((SPLIT, "[4]")), answer((SPLIT, "")), ""),
        # One is so far ahead that it tells no more of what the other waits in.
        (answer((SHARE, "[4]")), answer(*[(SHARE, "[4]")] * 9, first=8, done=16), ""),
        (answer((SUM, "[4]"), done=1), answer(), ""),
    ],
)
def test_the_first_number_at_which_two_ranks_differ(first, second, text):
    assert told({0: first, 1: second}) == text


def test_only_the_ranks_of_a_group_are_waited_for():
    of_group = {"group": "5 nccl", "ranks": (0, 2)}
    answers = {0: answer((SUM, "[4]"), **of_group), 1: answer(), 2: answer()}
    found = differences(answers, 3)
    assert [one.ranks for one in found] == [(0, 2)]
    assert told(answers, 3) == (
        "Collective 1 of ranks 0 and 2 is all_reduce of [4] on rank 0; rank 2 has come to none"
    )
    # One that has ended gives no answer, and is waited for; that it has ended is told elsewhere.
    del answers[2]
    (found_now,) = differences(answers, 3)
    assert found_now.behind == {}


def placed(answers, num_ranks=2):
    waiting = waits(answers, differences(answers, num_ranks))
    labels = {CELL: "Cell In[4]"}
    found = [
        at_wait(one, waiting[one.rank], labels) if one.rank in waiting else one
        for one in stacks(num_ranks)
    ]
    return [(one.operation, one.own_line.removeprefix("Cell In[4], ")) for one in found]


def test_a_rank_waits_at_the_collective_that_it_began():
    ahead = answer((SUM, "[3]"), (SUM, "[4]"), (SHARE, "[4]"), done=1)
    answers = {0: ahead, 1: answer((SUM, "[3]"), done=1)}
    assert placed(answers) == [(SUM, "line 12"), ("", "line 30")]


def test_a_gradient_has_no_line_of_the_users_so_the_rank_s_own_is_told():
    begun = wire.Collective(
        group="0 nccl",
        number=1,
        operation=SUM,
        is_pending=True,
        frames=(wire.Frame(f"{TORCH}/fsdp.py", 1, "hook"),),
    )
    answers = {0: wire.Collectives(begun=(begun,)), 1: wire.Collectives()}
    assert placed(answers)[0] == (SUM, "line 30")


def test_a_send_or_receive_waits_until_its_counterpart_is_begun():
    def point(kind, peer):
        (one,) = answer((f"{kind} rank {peer}", "[3]")).begun
        return wire.Collectives(begun=(msgspec.structs.replace(one, peer=peer),))

    receives = "recv from rank 1"
    both = {0: point("recv from", 1), 1: point("recv from", 0)}
    assert placed(both) == [(receives, "line 11"), ("recv from rank 0", "line 11")]
    assert placed({0: point("recv from", 1), 1: point("send to", 0)}) == [("", "line 30")] * 2
    assert placed({0: point("recv from", 1)})[0] == (receives, "line 11")
    other = {0: point("recv from", 1), 1: answer((SUM, "[3]"))}
    assert placed(other) == [(receives, "line 11"), (SUM, "line 11")]


def test_a_watch_waits_for_the_collectives_of_all_ranks():
    watch, state, now = HangWatch({CELL: "Cell In[4]"}), running(2), 100.0
    for rank in (0, 1):
        state = after(state, wire.Sample(rank=rank, usage=wire.Usage(cpu=100 if rank == 0 else 0)))
    for second in range(2):
        while not watch.asks(state, now=now):
            now += 0.2
            state = watch.look(state, now=now)
        for rank in (0, 1):
            watch.take(wire.Stacks(rank=rank, text=""))
        watch.take(wire.Collectives(rank=1))
        state = watch.look(state, now=now)
        assert state.hang is None
        watch.take(msg(answer((SUM, "[3]"))))
        state = watch.look(state, now=now)
        assert (state.hang is not None) == (second == 1)
    assert state.hang.is_certain
    assert state.hang.text == (
        "the run hangs: rank 0 waits in all_reduce at Cell In[4], line 11; rank 1 is silent. "
        "Collective 1 is all_reduce of [3] on rank 0; rank 1 has come to none. "
        "Every rank must make the same collective calls in one order"
    )


def msg(found):
    return wire.Collectives(rank=0, begun=found.begun)
