"""The summary as lines of text, whatever names the function gave."""

import pytest

from notebook_accel import wire
from notebook_accel.launch.control.run_state import starting
from notebook_accel.launch.view.progress import progress_lines
from notebook_accel.launch.view.summary import MAX_NAMED_METRICS, condition, summary_lines
from tests.notebook.states import after, logged, running, succeeded

HOSTILE_NAMES = [
    "a\x1b[2J\nFAKE: 99",
    "b\x9b31m",
    "c\x1b]0;title\x07",
    "d\r\x00\u202e\u2028x",
    "big" * 400_000,
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_is_one_short_line_of_plain_text(name):
    bar = wire.Bar(rank=0, bar=0, name=name, n=1, total=3, rate=1.0, elapsed=1.0, unit=name)
    state = after(running(1, name=name), logged(0, {name: 1.0}), bar)
    lines = summary_lines(succeeded(state), now=1042.0)
    assert len(lines) == 4, "a title, a head, a rank and a metric"
    assert max(map(len, lines)) < 250
    assert all(line.isprintable() for line in lines)
    assert lines[3].startswith(name[:1])


def test_ranks_that_were_not_asked_are_told_from_those_that_ran():
    state = starting(run="id", name="In[3]", world_size=3, started=1000.0, asked=frozenset([1, 2]))
    assert condition(state.ranks[0]) == "not asked"
    title, _, *rows = summary_lines(succeeded(state), now=1042.0)
    assert title.startswith("In[3]: succeeded, ranks 1-2 of 3, ")
    ends = [row.split(maxsplit=1)[1] for row in rows]
    assert ends == ["○ not asked", "✓ succeeded", "✓ succeeded"]
    assert progress_lines(succeeded(state).ranks[0])[0].fraction is None


def test_of_many_metrics_the_first_are_named():
    values = {f"m{number}": float(number) for number in range(20_000)}
    lines = summary_lines(after(running(1), logged(0, values)), now=1042.0)
    assert lines[-2] == f"m{MAX_NAMED_METRICS - 1}: {MAX_NAMED_METRICS - 1}"
    assert lines[-1] == f"… and {20_000 - MAX_NAMED_METRICS:,} more in run.metrics"
