import re
from dataclasses import replace

import pytest

from notebook_accel import wire
from notebook_accel.launch.control.curves import Curve
from notebook_accel.launch.control.run_state import RESCUED, Failure, Hang
from notebook_accel.launch.control.verdict import judge
from notebook_accel.render.markup import message_bytes
from notebook_accel.render.snapshot import MAX_BYTES, render_slim, render_snapshot
from tests.notebook.states import after, html_of, logged, metrics, running, succeeded, with_failed
from tests.render.test_markup import HOSTILE, Tags

ERROR = "rank 1 failed: ValueError: bad\n\nTraceback (most recent call last):\n  Cell In[3], line 7"
# What JupyterLab's sanitiser keeps of an untrusted notebook. GitHub keeps these tags, few of the
# attributes, and no image: in its place stands its alt.
KEPT_TAGS = "b details div img pre span summary table tbody td th thead tr"
KEPT_ATTRIBUTES = {"alt", "class", "height", "src", "style", "title", "width"}
LOST_STYLES = ("var(", "currentColor", "font-variant-numeric", "color-scheme", "stroke", "url(")


def full():
    state = after(
        running(2),
        wire.Output(rank=0, text="first\nlast of zero\n"),
        wire.Output(rank=1, text="last of one\n"),
        wire.Sample(rank=1, usage=wire.Usage(batches=300, steps=300, memory=400_000_000)),
        logged(0, {"loss": 0.25}),
        wire.Notice(text="one line for you"),
    )
    return with_failed(state, [1], error=ERROR)


def test_it_holds_ranks_metrics_output_and_traceback():
    kept = wire.Notice(text=f"{RESCUED}find_run('x').rescued")
    saved = wire.Notice(text="saved in /runs/1/saved")
    snapshot = render_snapshot(after(full(), saved, kept), metrics(["loss"]))
    page = Tags(html_of(snapshot))
    for words in (
        "train",
        "✗ failed",
        "2 ranks, 42.0 s",
        "300 steps",
        "400 MB",
        "last of zero",
        "last of one",
        "⚠ one line for you",
        f"✓ {kept.text}",  # good news, without the sign of a warning
        f"✓ {saved.text}",
        "ValueError: bad",
        "Cell In[3], line 7",
    ):
        assert words in page.text
    # Of the labels of a plot, and of the plot: what it shows.
    alts = [value for name, value in page.attributes if name == "alt"]
    assert alts == ["", "loss: 1 → 0.03688 at step 99"]
    for words in (
        "train: failed",
        "300 steps",
        "loss: 0.25",
        "one line for you",
        # Ranks that failed first.
        "output of rank 1:\nlast of one\noutput of rank 0:\nfirst\nlast of zero\n",
        ERROR,
    ):
        assert words in snapshot["text/plain"]
    # Where it is printed beside the summary, once is enough.
    beside = render_snapshot(full(), with_output=False)
    for words in ("last of zero", "one line for you"):
        assert words not in beside["text/plain"] + html_of(beside)


def test_as_text_the_last_lines_of_output_are_there_equal_ones_once():
    same = [wire.Output(rank=rank, text="\x1b[31mhello\x1b[0m\n") for rank in (0, 1)]
    long = wire.Output(rank=2, text="".join(f"line {n}\n" for n in range(500)), skipped=1000)
    text = render_snapshot(after(running(3), *same, long))["text/plain"]
    last = "\n".join(f"line {n}" for n in range(490, 500))
    end = f"output of ranks 0-1:\nhello\noutput of rank 2, the last lines of 1,500:\n{last}"
    assert text.endswith(end)
    alone = after(running(1), wire.Output(rank=0, text="hello\n"))
    assert render_snapshot(alone)["text/plain"].endswith("\noutput:\nhello")
    many = [wire.Output(rank=rank, text=f"{rank} {'x' * 400}\n" * 5) for rank in range(8)]
    text = render_snapshot(after(running(8), *many))["text/plain"]
    assert text.endswith("\nmore output: run.logs()")
    assert len(text) < 8_000


def test_the_value_beside_a_chart_is_the_newest_though_its_step_had_a_higher_one():
    curve = Curve()
    for step, value in ((8, 1.5), (9, 4.91), (9, 0.91)):
        curve.add(step, value)
    html = str(html_of(render_snapshot(running(2), {"loss": curve})))
    assert "0.91" in html
    assert "4.91" not in re.sub(r"base64,[^\"']*", "", html)


def test_the_chart_of_a_knob_comes_last_though_it_was_logged_first():
    page = Tags(html_of(render_snapshot(running(2), metrics(["knob/lr", "loss"]))))
    alts = [value.partition(":")[0] for name, value in page.attributes if name == "alt" and value]
    assert alts == ["loss", "knob/lr"]


@pytest.mark.parametrize("state", [full(), succeeded(running(128)), running(1, name=HOSTILE)])
def test_it_uses_only_what_a_sanitiser_keeps(state):
    markup = html_of(render_snapshot(state, metrics(["loss", HOSTILE])))
    page = Tags(markup)
    assert set(page.tags) <= {*KEPT_TAGS.split()}
    assert {name for name, _ in page.attributes} <= KEPT_ATTRIBUTES
    styles = " ".join(value or "" for name, value in page.attributes if name == "style")
    assert [lost for lost in LOST_STYLES if lost in styles] == []
    assert not re.search(r"<(script|style|svg)", markup)


def test_text_has_no_colour_of_its_own_but_where_it_means_something():
    """Text takes the page's colour, light or dark; the rest is in mid tones."""
    page = Tags(html_of(render_snapshot(full(), metrics(["loss"]))))
    styles = " ".join(value or "" for name, value in page.attributes if name == "style")
    for colour in re.findall(r"#[0-9a-f]{6}", styles):
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert 60 < 0.299 * red + 0.587 * green + 0.114 * blue < 190, colour


def test_short_output_stays_open_and_of_a_long_one_its_end_does():
    state = after(running(1), wire.Output(rank=0, text="one\ntwo\n"))
    page = Tags(html_of(render_snapshot(state)))
    assert "details" not in page.tags
    assert "one\ntwo" in page.text
    state = after(running(1), wire.Output(rank=0, text="x\n" * 149 + "end\n", skipped=1000))
    page = Tags(html_of(render_snapshot(state)))
    assert page.tags.count("details") == 1
    # It must be true of the fold while it is closed, and of the open one.
    assert "last 10 of 1,150 lines of output, 140 earlier ones in this fold" in page.text
    assert page.text.endswith("end")


def test_the_output_of_a_rank_that_failed_comes_first_and_is_open():
    printed = [wire.Output(rank=rank, text=f"of {rank}\n" * 30) for rank in range(8)]
    page = html_of(render_snapshot(with_failed(after(running(8), *printed), [5], error="bad")))
    # The last lines of one rank stay open; all other lines are in folds.
    unfolded = Tags(re.sub("<details.*?</details>", "", page, flags=re.DOTALL)).text
    assert unfolded.count("of 5") == 10
    assert "of 0" not in unfolded
    text = Tags(page).text
    assert text.index("rank 5: last 10 of 30 lines") < text.index(
        "output of ranks 0-4 and 6-7rank 0"
    )


def told_of(state):
    """What the summary of the run, as failed, says on a page and as text."""
    verdict = judge(state, is_stopped=False, lost=(), log_dir="logs")
    state = replace(state, status=verdict.status, ended=1042.0, failure=verdict.failure)
    snapshot = render_snapshot(state)
    return Tags(html_of(snapshot)).text, snapshot["text/plain"]


def test_what_the_error_does_not_show_of_another_rank_stays_in_its_output():
    state = running(3)
    for rank, kind, says in (
        (0, "exception", "ValueError: bad"),
        (1, "lost peer", "RuntimeError: peer closed"),
        (2, "exception", "KeyError: 'x'"),
    ):
        text = f"Traceback (most recent call last):\n  in rank {rank}\n{says}\n"
        said = wire.Output(rank=rank, text=f"The backend says:\n{text}" if rank == 1 else text)
        name, _, words = says.partition(": ")
        raised = wire.Raised(rank=rank, kind=kind, type_name=name, text=words, traceback=text)
        state = after(state, said, raised)
    for shown in told_of(state):
        assert shown.count("in rank 0") == shown.count("in rank 2") == 1
        assert "The backend says:\nRuntimeError: peer closed" in shown
        assert "in rank 1" not in shown


def test_a_traceback_whose_frames_of_libraries_are_folded_is_shown_once():
    library = '  File "/x/site-packages/lib/a.py", line 1, in f\n    f()\n'
    text = (
        f"Traceback (most recent call last):\n  Cell In[3], line 7\n{library * 3}ValueError: bad\n"
    )
    state = running(2)
    for rank in range(2):
        # Printed behind what has no line's end.
        said = wire.Output(rank=rank, text=f"epoch 1: {text}")
        raised = wire.Raised(
            rank=rank, kind="exception", type_name="ValueError", text="bad", traceback=text
        )
        state = after(state, said, raised)
    for shown in told_of(state):
        assert shown.count("Cell In[3]") == shown.count("3 frames of lib") == 1
        assert "a.py" not in shown
        assert "epoch 1: " in shown


def test_of_many_ranks_the_folds_are_in_one():
    lines = [wire.Output(rank=rank, text=f"line of {rank}\n" * 5) for rank in range(64)]
    html = html_of(render_snapshot(after(running(64), *lines)))
    # Sixty lines of output stay open: those of twelve ranks.
    start, end = html.index("<details>"), html.rindex("</details>")
    folded, page = Tags(html[start:end]), Tags(html[:start] + html[end:])
    assert folded.text.startswith("output of ranks 12-63rank 12line of 12")
    assert folded.tags.count("pre") == 52
    assert page.tags.count("pre") == 12


def test_the_stacks_of_a_hang_are_kept_below_a_fold():
    stacks = tuple(((rank,), f"stack of {rank}: " + "<" * 4_000) for rank in range(10))
    hang = Hang(
        is_certain=True, text="it hangs", since=1000.0, operations={}, elsewhere={}, stacks=stacks
    )
    state = replace(succeeded(running(10)), hang=hang)
    html = html_of(render_snapshot(state))
    folded = Tags(re.findall("<details>.*?</details>", html, flags=re.DOTALL)[0])
    assert folded.text.startswith("stacks of the ranksrank 0stack of 0: <<")
    assert folded.tags.count("pre") == 8
    assert folded.text.endswith("… and 2 more")
    assert message_bytes(html) < 30_000
    asked = "stacks after 0:12", (((0,), "it waits"), ((1,), "it computes"))
    html = html_of(render_snapshot(state, asked_stacks=asked))
    titles = re.findall("<summary>(.*?)</summary>", html)
    assert titles == ["stacks of the ranks", "stacks after 0:12"]
    assert "it computes" in html


def test_no_metric_vanishes_without_a_word():
    names = [f"metric-{number}" for number in range(30)]
    page = Tags(html_of(render_snapshot(running(1), metrics(names))))
    assert [name for name in names if name not in page.text] == []
    names = [f"metric-{number}" for number in range(100)]
    page = Tags(html_of(render_snapshot(running(1), metrics(names, steps=2))))
    assert "… and 34 more in run.metrics" in page.text


def test_the_line_of_a_cell_that_ended_at_once_names_the_last_metrics():
    values = [logged(0, {"loss": 0.5, "accuracy": 0.75}), logged(0, {"loss": 0.31})]
    snapshot = render_slim(succeeded(after(running(2, name="In[3]"), *values)))
    assert Tags(html_of(snapshot)).text.endswith("42.0 s · loss 0.31, accuracy 0.75")
    assert snapshot["text/plain"] == "In[3]: succeeded, 2 ranks, 42.0 s, loss 0.31, accuracy 0.75"
    many = logged(0, {f"m{number}": 1.0 for number in range(9)})
    text = render_slim(after(running(1), many))["text/plain"]
    assert text.endswith("m3 1, and 5 more in run.metrics")


HOSTILE_NAMES = ["big" * 400_000, "a\x1b[2J\nFAKE: 99", "\u202eb\x00\x9b31m"]
HOSTILE_NAMES += map(str, range(20_000))


def hostile():
    """Long names everywhere, of characters that HTML and JSON write as several bytes."""
    values = dict.fromkeys(HOSTILE_NAMES, 1.0)
    state = running(200, name="\x1b[2J'\"\n" * 100_000)
    for rank in range(200):
        text = f"{rank}" + "'\"\U0001f600" * 200 + "\n"
        bar = wire.Bar(rank=rank, bar=0, name=text, n=1, total=3, rate=1.0, elapsed=1.0, unit=text)
        state = after(state, wire.Output(rank=rank, text=text * 3), bar)
    state = after(state, logged(0, values))
    failure = Failure(message="\x1b[2J'\n" * 100_000)
    return replace(state, notices=("\x1b[2J\n'" * 10_000,) * 20, failure=failure)


def test_no_name_and_no_number_of_them_breaks_the_limits():
    state, curves = hostile(), metrics(HOSTILE_NAMES, steps=2)
    for snapshot in (render_snapshot(state, curves), render_slim(state)):
        assert message_bytes(html_of(snapshot)) <= MAX_BYTES
        assert len(snapshot["text/plain"]) <= 20_000
        for text in (html_of(snapshot), snapshot["text/plain"]):
            assert not re.search("[\x00\x1b\x9b\u202e]", text)
        assert "\nFAKE" not in snapshot["text/plain"]
