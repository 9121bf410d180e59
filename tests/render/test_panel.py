from dataclasses import replace

import pytest

from notebook_accel import wire
from notebook_accel.launch.control.run_state import Hang
from notebook_accel.render.markup import message_bytes
from notebook_accel.render.panel import render_alert, render_panel, render_title
from tests.notebook.states import after, logged, running, with_failed
from tests.render.test_markup import HOSTILE, Tags

NOW = 1042.0


def bar(rank, number=1, **fields):
    given = {"name": "epoch 1", "n": 50.0, "total": 200.0, "rate": 10.0, **fields}
    return wire.Bar(rank=rank, bar=number, **given)


def sample(rank, **usage):
    return wire.Sample(rank=rank, usage=wire.Usage(**usage))


# A run, and what its title and its rows say.
SHOWN = {
    "a bar, and what its rank takes of its machine": (
        after(running(1), bar(0), sample(0, memory=412_000_000, cpu=97)),
        "train running 0:42 | rank 0: epoch 1: 50/200 | 0.25 | 10.0 it/s | 0:15 | 97% 412 MB",
    ),
    "what its loader counted": (
        after(running(2), sample(1, batches=250, total_batches=100, pass_start=200, steps=125)),
        "batches 50/100 | 25.0 batch/s 0:02 125",
    ),
    "its steps alone": (after(running(1), sample(0, steps=1_240)), "steps 1,240 1,240"),
    "what it takes of its device": (
        after(running(1), sample(0, cpu=97, device_use=80, device_memory=21_300_000_000)),
        "left step gpu gpu mem cpu | 80% 21.3 GB 97%",
    ),
}


@pytest.mark.parametrize(("state", "words"), SHOWN.values(), ids=SHOWN)
def test_a_row_says_how_far_its_rank_is_and_what_it_takes(state, words):
    page = Tags(render_title(state, NOW) + render_panel(state, {1: 25.0}))
    shown = f"{page.text} {page.attributes}".replace(" ", "")
    assert [part for part in words.split(" | ") if part.replace(" ", "") not in shown] == []


def test_ranks_that_take_their_time_to_leave_are_told_to_be_waited_for():
    def told(stopping):
        return Tags(render_panel(running(2), stopping=stopping, grace=10.0)).text

    assert "Kill" not in told(0.0)
    assert "Kill" not in told(0.5)
    assert "Stop again interrupts them, and ends them 10 s later" in told(2.5)
    assert "Kill ends them now, and results are lost." in told(2.5)


def num_rows(state):
    return Tags(render_panel(state)).tags.count("tr")


def test_no_row_goes_when_an_inner_bar_does_and_of_many_ranks_none_comes():
    state = after(running(4), bar(0, 1), bar(0, 2), bar(0, 3))
    assert num_rows(state) == 1 + 4 + 2
    # The next epoch has a bar of its own, inside of which none is open yet.
    ended = [bar(0, number, closed=True) for number in (3, 2, 1)]
    state = after(state, *ended, bar(0, 4))
    assert num_rows(state) == 1 + 4 + 2
    assert Tags(render_panel(state)).tags.count("progress") == 4
    state = after(running(5), bar(0, 1), bar(0, 2))
    assert num_rows(state) == 1 + 5
    assert Tags(render_panel(state)).tags.count("progress") == 6


def test_the_title_says_on_what_and_how_fast():
    state = running(2)
    for rank in (0, 1):
        state = after(state, sample(rank, steps=5, device="NVIDIA H200"))
    page = Tags(render_title(state, NOW, (12.5, "step")))
    assert page.text == "trainrunning0:422 x NVIDIA H20012.5 step/s"
    page = Tags(render_title(state, NOW, (0.4, "batch")))
    assert page.text.endswith("2.50 s/batch")


def hanging():
    hang = Hang(
        is_certain=True,
        text="the run hangs: rank 0 waits in all_reduce",
        since=1029.0,
        operations={0: "all_reduce"},
        elsewhere={1: "at Cell In[4], line 5"},
        stacks=(((0,), "here"), ((1,), "there")),
    )
    return replace(running(2), hang=hang, ended=1042.0)


def test_who_waits_for_whom():
    page = Tags(render_panel(hanging()))
    for words in ("Nothing has moved for 0:13: the run hangs", "waits", "in all_reduce"):
        assert words in page.text
    assert "elsewhere" in page.text
    assert "at Cell In[4], line 5" in page.text
    assert ("class", "na-c-state na-elsewhere") in page.attributes
    assert ("title", "other ranks wait for it") in page.attributes
    assert ("class", "na-c-label na-in") in page.attributes
    # When it is over, what was said of it stays.
    later = Tags(render_panel(running(2), last_hang="Nothing has moved for 0:13"))
    assert later.text.endswith("The run goes on. Before that: Nothing has moved for 0:13")
    # Each takes the room of its empty bar.
    assert page.attributes.count(("colspan", "2")) == 2
    assert "progress" not in page.tags


def test_a_screen_reader_is_told_in_words_that_do_not_change_with_the_clock():
    assert render_alert(running(2)) == ""
    later = replace(hanging(), ended=1050.0)
    assert render_alert(hanging()) == render_alert(later)
    page = Tags(render_alert(later))
    assert page.text == "train: the run hangs: rank 0 waits in all_reduce"
    assert page.attributes == [("role", "alert")]
    page = Tags(render_alert(replace(running(2, name=HOSTILE), status="stopping")))
    assert page.text.endswith(": waiting for the ranks to leave")
    assert page.tags == ["div"]
    # What is drawn anew each second would be said each second.
    drawn = Tags(render_title(later, NOW) + render_panel(later, stopping=3.0))
    assert not [value for name, value in drawn.attributes if name == "role"]


def test_a_rank_that_says_nothing_is_quiet_or_suspended():
    state = after(running(3), sample(1, is_suspended=True))
    quiet = [replace(rank, quiet_since=state.now() - 12.4) for rank in state.ranks[:2]]
    page = Tags(render_panel(replace(state, ranks=(*quiet, state.ranks[2]))))
    assert "quiet 0:12" in page.text
    assert page.text.count("running") == 1
    assert ("class", "na-c-state na-suspended") in page.attributes
    assert ("title", "SIGSTOP or a debugger holds its process") in page.attributes


def test_nothing_from_a_rank_becomes_markup():
    state = after(running(2, name=HOSTILE), bar(1, name=HOSTILE), wire.Notice(text=HOSTILE))
    page = Tags(render_title(state, NOW) + render_panel(state))
    assert not {"script"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("<script>alert('x')</script>") >= 3


@pytest.mark.parametrize("num_ranks", [1, 8, 16, 128])
@pytest.mark.parametrize("line", ["short", "x" * 100_000, "<" * 9999, '"\\\n' * 99, "語" * 999])
def test_it_is_small_whatever_ranks_print(num_ranks, line):
    state = running(num_ranks)
    for rank in range(num_ranks):
        state = after(
            state,
            wire.Output(rank=rank, text=f"{line}\n" * 9),
            bar(rank, name=line),
            logged(rank, {f"{line}{number}": 0.1 for number in range(12)}),
            wire.Notice(text=f"{line}{rank}"),
        )
    state = with_failed(state, [0], error=f"{line}\n" * 100)
    assert message_bytes(render_panel(state)) <= 18_000


def test_of_many_ranks_all_are_in_a_row_and_the_slowest_have_one_each():
    state = running(128)
    for rank in range(128):
        state = after(state, sample(rank, batches=50 + rank % 64, total_batches=200))
    state = with_failed(state, [77])
    page = Tags(render_panel(state))
    assert page.tags.count("i") == 128
    assert page.tags.count("progress") == 6
    rows = [value for name, value in page.attributes if name == "aria-label"]
    assert [row.split(":")[0] for row in rows if row] == [
        f"rank {rank}" for rank in (77, 0, 64, 1, 65, 2)
    ]
    assert "slowest first, … and 122 more, all running" in page.text
    # Whoever is picked has a row as well.
    page = Tags(render_panel(state, picked=100))
    assert any(value and value.startswith("rank 100:") for _, value in page.attributes)
