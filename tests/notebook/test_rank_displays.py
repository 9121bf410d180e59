"""What ranks display as one piece of HTML, for a cell that has ended."""

import base64

import pytest

from notebook_accel import wire
from notebook_accel.notebook.rank_displays import RankDisplays
from notebook_accel.render import snapshot
from notebook_accel.render.snapshot import (
    other_displays,
    render_displays,
    render_slim,
    render_snapshot,
)
from tests.notebook.states import after, html_of, running, succeeded
from tests.notebook.test_dashboard import Page
from tests.render.test_markup import HOSTILE, Tags

SVG = "<svg xmlns='http://www.w3.org/2000/svg'><text>ä</text></svg>"
SCRIPT = "<script>\n\nlet x = '$5'\n</script>"


def displaying(*texts, rank=0, num_ranks=1):
    messages = [wire.Displayed(rank=rank, data={"text/html": text}) for text in texts]
    return after(running(num_ranks), *messages)


@pytest.mark.parametrize(
    ("data", "tag", "found"),
    [
        ({"text/html": SCRIPT, "image/png": "AAAA"}, "script", "let x = '$5'"),
        ({"image/png": "AAAA", "text/plain": HOSTILE}, "img", "data:image/png;base64,AAAA"),
        ({"image/jpeg": "AAAA"}, "img", "data:image/jpeg;base64,AAAA"),
        ({"image/svg+xml": SVG}, "img", base64.b64encode(SVG.encode()).decode()),
        ({"text/markdown": HOSTILE, "text/plain": "<Markdown>"}, "pre", "<script>alert('x')"),
        ({"text/latex": "$x$", "text/plain": "<Latex>"}, "pre", "$x$"),
        ({"application/json": "{}", "text/plain": HOSTILE}, "pre", "<script>alert('x')"),
    ],
)
def test_each_kind_is_drawn_or_has_its_text(data, tag, found):
    page = Tags(render_displays(after(running(1), wire.Displayed(rank=0, data=data))))
    assert page.tags == ["div", tag]
    assert any(
        found in text for text in (page.text, *(value or "" for _, value in page.attributes))
    )


def test_the_newest_that_have_room_are_shown_and_the_others_counted(monkeypatch):
    monkeypatch.setattr(snapshot, "_MAX_BYTES", 200)
    assert render_displays(running(2)) == ""
    page = Tags(render_displays(displaying("<i>old</i>", "x" * 50, "<b>new</b>", num_ranks=2)))
    assert page.text == (
        "rank 0"
        "1 more not shown here: import notebook_accel; notebook_accel.find_run('id').show(0) "
        f"shows the newest 3{'x' * 50}new"
    )
    # Of a rank the newest twenty are kept.
    page = Tags(render_displays(displaying(*(f"<i>{number}</i>" for number in range(22)))))
    assert page.text.startswith("19 more not shown here: ")
    assert page.text.endswith("shows the newest 20192021")
    # Of what is kept nowhere nothing can be shown.
    monkeypatch.undo()
    page = Tags(render_displays(displaying(*(f"<i>{number}</i>" for number in range(22)))))
    assert page.text.startswith("2 more not shown here23")


def test_ranks_that_displayed_something_else_are_named_in_the_summary():
    # Their ids, which each rank makes for itself, make no difference.
    same = [
        wire.Displayed(rank=rank, data={"text/html": "same"}, display_id=f"id of {rank}")
        for rank in (0, 1)
    ]
    state = after(running(4), *same)
    assert other_displays(state) == ""
    others = [wire.Displayed(rank=rank, data={"text/html": f"of {rank}"}) for rank in (2, 3)]
    state = after(state, *others)
    line = "what ranks 2-3 displayed: import notebook_accel; notebook_accel.find_run('id').show(2)"
    assert Tags(other_displays(state)).text == line
    for made in (render_snapshot(state), render_slim(state)):
        assert Tags(html_of(made)).text.endswith(line)


def test_the_summary_has_them_below_as_the_person_made_them():
    state = displaying(SCRIPT)
    assert SCRIPT in render_snapshot(state, with_displays=True)["text/html"]
    assert SCRIPT not in render_snapshot(state)["text/html"]


def test_an_output_is_replaced_once_a_second_and_shows_the_last_in_the_end(monkeypatch, clock):
    page = Page(monkeypatch)
    displays, state = RankDisplays(), running(1)
    seen = []
    for clock.now, html in ((9.0, "1"), (9.1, "2"), (9.5, "3"), (10.2, "4"), (10.3, "5")):
        plot = {"text/html": html}
        state = after(state, wire.Displayed(rank=0, data=plot, display_id="x", replaces=html > "1"))
        displays.show_new(state)
        seen.append(page.only["text/html"])
    assert seen == ["1", "2", "2", "4", "4"]
    displays.show_new(succeeded(state))
    assert page.only["text/html"] == "5"
    assert len(page.placed) == 1


def test_what_comes_after_clear_output_takes_the_places_of_what_was_there(monkeypatch, clock):
    page = Page(monkeypatch)
    displays, state = RankDisplays(), running(2)
    seen = []
    for clock.now, texts in enumerate((["a", "b"], ["c"], ["d", "e", "f"], [], ["g"]), start=10):
        clears = clock.now > 10
        if not texts:
            state = after(state, wire.Displayed(rank=0, data={}, clears=True))
        for text in texts:
            state = after(state, wire.Displayed(rank=0, data={"text/html": text}, clears=clears))
            clears = False
        displays.show_new(state)
        # Too early for what replaces others.
        early = after(state, wire.Displayed(rank=0, data={"text/html": "early"}, clears=True))
        if texts and clock.now > 10:
            displays.show_new(early)
        labels, shown = page.placed[::2], page.placed[1::2]
        seen.append([page.shown[slot]["text/html"] for slot in shown])
        assert ["rank 0" in page.shown[slot]["text/plain"] for slot in labels] == [
            bool(text) for text in seen[-1]
        ]
        assert render_displays(state).count("<div") == len(texts) + bool(texts)
    assert seen == [["a", "b"], ["c", ""], ["d", "e", "f"], ["", "", ""], ["g", "", ""]]
    assert len(page.placed) == 6
