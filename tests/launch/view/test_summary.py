"""The summary as lines of text, whatever names the function gave."""

from notebook_accel.launch.control.run_state import starting
from notebook_accel.launch.view.progress import progress_lines
from notebook_accel.launch.view.summary import MAX_NAMED_METRICS, condition, summary_lines
from tests.notebook.states import after, logged, running, succeeded


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
