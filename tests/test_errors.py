"""The errors: their tree, what they carry, and that they travel."""

import copy
import pickle

import pytest

import notebook_accel
from notebook_accel.config import resolve
from notebook_accel.errors import (
    ConfigError,
    LaunchError,
    NotebookAccelError,
    RunStopped,
    WorkerError,
)

TREE = {
    NotebookAccelError: RuntimeError,
    LaunchError: NotebookAccelError,
    WorkerError: NotebookAccelError,
    RunStopped: NotebookAccelError,
    ConfigError: NotebookAccelError,
}
DETAILS = {
    "rank": 2,
    "ranks": [2, 3],
    "traceback": "Traceback …",
    "exitcode": None,
    "signal": "SIGKILL",
}


def test_the_tree():
    assert {kind: kind.__mro__[1] for kind in TREE} == TREE
    assert issubclass(ConfigError, ValueError)
    for kind in TREE:
        assert getattr(notebook_accel, kind.__name__) is kind


def test_a_worker_error_has_its_parts_from_the_start():
    error = WorkerError("rank 2 was killed", **DETAILS)
    assert {name: getattr(error, name) for name in DETAILS} == DETAILS
    assert (str(error), error.run) == ("rank 2 was killed", None)
    bare = WorkerError("the agent died")
    assert (bare.rank, bare.exitcode, bare.signal) == (None, None, None)
    assert (bare.ranks, bare.traceback) == ([], "")
    assert bare.ranks is not WorkerError("another").ranks


@pytest.mark.parametrize("travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
@pytest.mark.parametrize("kind", TREE)
def test_errors_travel_without_their_run(kind, travel):
    error = kind("what was wrong", **(DETAILS if kind is WorkerError else {}))
    error.run = threadlike = (n for n in ())
    error.note = "mine"
    there = travel(error)
    assert type(there) is kind
    assert str(there) == "what was wrong"
    assert there.run is None
    assert there.note == "mine"
    assert error.run is threadlike
    if kind is WorkerError:
        assert {name: getattr(there, name) for name in DETAILS} == DETAILS


def test_what_ipython_shows_is_the_message_and_no_frame_of_ours():
    def user_code():
        resolve({"num_processes": -1})

    with pytest.raises(ConfigError) as caught:
        user_code()
    text = "\n".join(caught.value._render_traceback_())
    assert "user_code" in text
    assert "config.py" not in text
    assert "num_processes=-1" in text


def test_a_notebook_shows_the_error_of_a_rank_once_below_its_traceback():
    traceback = "Traceback (most recent call last):\n  Cell In[3], line 7\nlib.OddError: bad\n"

    def shown(said):
        message = f"rank 1 failed: {said}\n\n{traceback}\nThe whole output"
        error = WorkerError(message, rank=1, traceback=traceback)
        assert str(error) == message
        return error._render_traceback_()[-1].partition("\x1b[0m: ")[2]

    assert shown("OddError: bad") == f"rank 1 failed:\n\n{traceback}\nThe whole output"
    # Nowhere else: of an error without a text, or in a traceback that was cut.
    assert shown("OddError: worse").startswith("rank 1 failed: OddError: worse\n\nTraceback")
    assert WorkerError("rank 2 was killed")._render_traceback_()[-1].endswith("rank 2 was killed")
