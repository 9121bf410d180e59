"""What cells set up in the notebook holds in its ranks, as in a fork of the notebook."""

import io
import json
import logging
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch

from notebook_accel.launch.setup.states import apply, apply_generators, capture, generators
from tests.interpreters import run_script

# A notebook: asks its two ranks and then itself what they see, before it has imported a library
# and after it has set things up.
NOTEBOOK = """
import json, os, sys
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.launcher import launch
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.notebook.cell_setup import read_setup

def ask(function):
    config = LaunchConfig(num_processes=2, devices="cpu")
    setup, _ = read_setup(None)
    runs = [launch(LaunchRequest(function=function, config=config, setup=setup)) for _ in range(2)]
    logs = [run.logs(rank) for run in runs for rank in range(2)]
    return dict(ranks=[*runs[0], *runs[1]], here=function(), logs=logs)

def early():
    import numpy, torch
    return [numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()]

assert not {"torch", "numpy"} & set(sys.modules)
found = dict(early=ask(early))

import logging, random, tempfile
import numpy, torch

random.seed(3), numpy.random.seed(4), torch.manual_seed(5)
random.gauss(0, 1), numpy.random.randn(3), torch.randn(7)

class Mine(logging.Handler):
    def emit(self, record): pass

logging.basicConfig(
    level=logging.INFO, stream=sys.stdout, format="{levelname} of {name}: {message}", style="{"
)
logging.getLogger().addHandler(Mine())
logging.getLogger("mine").setLevel(logging.DEBUG)
logging.getLogger("quiet").disabled = 1  # as logging.config.fileConfig sets it
path = tempfile.mktemp() + "\\udcff"  # a name that is not UTF-8
to_file = logging.FileHandler(path, mode="w")
for name in ("filed", __name__):
    logging.getLogger(name).addHandler(to_file)
    logging.getLogger(name).propagate = 0
logging.getLogger("filed").warning("notebook")

def draws():
    torch.utils.data.random_split(range(100), [50, 50])
    seed = torch.initial_seed()
    return [random.random(), random.gauss(0, 1), numpy.random.randn(), torch.rand(1).item(), seed]

def logs():
    logging.getLogger("mine").debug("seen")
    logging.getLogger("other").info("seen too")
    logging.getLogger("other").debug("not seen")
    logging.getLogger("quiet").error("not seen")
    return [type(handler).__name__ for handler in logging.getLogger().handlers]

def files():
    logging.getLogger("filed").warning("rank " + os.environ.get("RANK", "none"))
    logging.getLogger(__name__).warning("cell of rank " + os.environ.get("RANK", "none"))
    return open(path).read().split(chr(10))

def late():
    seen = (draws, logs, files)
    return {function.__name__: function() for function in seen}

found["late"] = ask(late)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    return json.loads(run_script(NOTEBOOK).splitlines()[-1])


@pytest.fixture(scope="module")
def seen(found):
    """By question, what the two ranks of both launches say, and then the notebook itself."""
    ranks, here = found["late"]["ranks"], found["late"]["here"]
    return {name: {"ranks": [rank[name] for rank in ranks], "here": here[name]} for name in here}


def test_ranks_start_from_the_notebooks_generators(seen):
    """Both of them, in both launches: a launch draws nothing in the notebook."""
    assert seen["draws"]["ranks"] == [seen["draws"]["here"]] * 4
    assert seen["draws"]["here"][-1] == 5


def test_levels_and_plain_handlers_of_logging_reach_the_ranks(found, seen):
    for text in found["late"]["logs"]:
        assert text.splitlines() == ["DEBUG of mine: seen", "INFO of other: seen too"]
    # A handler that is a class of its own stays in the notebook.
    assert seen["logs"]["ranks"] == [["StreamHandler"]] * 4
    assert seen["logs"]["here"] == ["StreamHandler", "Mine"]


def test_a_log_file_is_added_to_and_never_cut(seen):
    lines = seen["files"]["here"]
    assert (lines[0], lines[-3:]) == ("notebook", ["rank none", "cell of rank none", ""])
    of_ranks = [f"{of}rank {rank}" for of in ("cell of ", "") for rank in (0, 0, 1, 1)]
    assert sorted(lines[1:-3]) == of_ranks


def test_a_library_that_the_notebook_has_not_imported_is_seeded_alike_in_all_ranks(found):
    drawn = found["early"]["ranks"]
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True)), "as forks would draw"


class OwnHandler(logging.Handler):
    pass


OWN, CELL = partial(OwnHandler, logging.INFO), "of a cell"


def lines_of_rank(make, level, propagates, has_filter):
    """What a rank writes once a cell has set up such a handler, and one of the root logger."""

    logger, handler = logging.getLogger(CELL), make()
    if has_filter:
        handler.addFilter(lambda record: bool(vars(record).update(user="me")) or True)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagates
    logging.root.handlers = [logging.StreamHandler(sys.stderr)]
    state = capture()
    logging.root.handlers = []
    logger.removeHandler(handler)
    sys.stderr = io.StringIO()
    apply(state)
    logger.debug("too fine")
    logger.info("begun")
    logger.error("broken")
    return sys.stderr.getvalue()


def on_stderr(format_, **of_formatter):
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(format_, **of_formatter))
    return handler


@pytest.mark.parametrize(
    ("make", "level", "propagates", "has_filter", "text"),
    [
        (OWN, logging.DEBUG, False, False, f"INFO:{CELL}:begun\nERROR:{CELL}:broken\n"),
        # As Python does without a handler.
        (OWN, logging.ERROR, False, False, "broken\n"),
        (logging.NullHandler, logging.INFO, False, False, ""),
        # The root logger's handler travels.
        (OWN, logging.INFO, True, False, "begun\nbroken\n"),
        # Filters stay in the notebook, with the handler that needs them: Python's last resort
        # writes the line.
        (partial(on_stderr, "%(user)s %(message)s"), logging.ERROR, False, True, "broken\n"),
        (
            partial(on_stderr, "%(user)s %(message)s", defaults={"user": "me"}),
            *(logging.ERROR, False, False, "me broken\n"),
        ),
        (partial(on_stderr, "a line", validate=False), logging.ERROR, False, False, "a line\n"),
    ],
)
def test_no_line_of_a_handler_or_a_format_is_lost_in_the_ranks(
    make, level, propagates, has_filter, text
):
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        asked = pool.submit(lines_of_rank, make, level, propagates, has_filter)
        assert asked.result(60) == text


def test_seeding_a_rank_does_not_ask_the_driver(monkeypatch):
    """Once it has answered, the function cannot choose devices by CUDA_VISIBLE_DEVICES."""

    seeded = []
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.delattr(torch.accelerator, "is_available")
    monkeypatch.delattr(torch.cuda, "is_available")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    state = generators()
    apply_generators(**state)
    assert seeded == [state["torch_seed"]], "devices start from it"


def test_the_arguments_of_a_kernel_stay_with_it(monkeypatch):
    app = SimpleNamespace(IPKernelApp=SimpleNamespace(initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", app)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ipykernel_launcher", "-f", "c.json"])
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "c.json"])
    assert capture()["arguments"] == ("",)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert capture()["arguments"] == ("train.py",)
