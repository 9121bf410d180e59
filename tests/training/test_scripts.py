"""Published training loops run with only the import changed, and give Accelerate's numbers.

The loops are in ``scripts/``. One launch runs them all on two CPU ranks, with one library and then
with the other, one loop after the other; the numbers of rank r must be those of Accelerate's.
"""

import gc
import importlib
import math
import traceback
import warnings
from pathlib import Path

import pytest
import torch

from notebook_accel import notebook_launcher
from tests.training.scripts import LOOPS
from tests.training.single import forget_states

pytest.importorskip("accelerate")
# A launch that imports transformers and runs thirty loops twice: some 12 s where nothing else runs.
pytestmark = pytest.mark.timeout(600)


def forget(library):
    """Let the next loop begin as a script of its own would."""
    forget_states(library, forgets_ranks=False)
    gc.collect()
    # What is left stays, most of it modules: to look through it after each loop would take 0.1 s.
    gc.freeze()


def run_loops_of_both(names, folder):
    """Of each library, what each loop gives on this rank, or the text of its error."""
    # Ours first: as in a script, it finds no process group but its own.
    libraries = ("notebook_accel", "accelerate")
    return {library: run_loops(library, names, f"{folder}/{library}") for library in libraries}


def run_loops(library_name, names, folder):
    library = importlib.import_module(library_name)
    # Accelerate's PartialState() alone makes a world of one on a CPU, whatever was launched.
    state = library.Accelerator(cpu=True).state
    results = {}
    for name in names:
        own = Path(folder) / name
        own.mkdir(parents=True, exist_ok=True)
        forget(library)
        torch.manual_seed(0)
        state.wait_for_everyone()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results[name] = LOOPS[name](library, own)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        state.wait_for_everyone()
    return results


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """Of each library, what its two ranks gave."""
    folder = str(tmp_path_factory.mktemp("loops"))
    run = notebook_launcher(
        run_loops_of_both, (list(LOOPS), folder), num_processes=2, view="none", timeout=500
    )
    return {library: [rank[library] for rank in run] for library in run[0]}


@pytest.mark.parametrize("name", LOOPS)
def test_a_script_gives_accelerates_numbers(name, numbers):
    for theirs, ours in zip(numbers["accelerate"], numbers["notebook_accel"], strict=True):
        assert "error" not in theirs[name], theirs[name]["error"]
        assert "error" not in ours[name], ours[name]["error"]
        assert list(differences(theirs[name], ours[name])) == []


def differences(theirs, ours, path=""):
    """Where two results differ: numbers by more than the order of sums explains."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        for key in theirs:
            yield from differences(theirs[key], ours[key], f"{path}.{key}")
    elif isinstance(theirs, (list, tuple)) and len(theirs) == len(ours):
        for index, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(theirs, float):
        if not math.isclose(theirs, ours, rel_tol=1e-5, abs_tol=1e-7):
            yield path, theirs, ours
    elif theirs != ours:
        yield path, theirs, ours
