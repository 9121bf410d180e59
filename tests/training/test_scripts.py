"""Published training loops run with only the import changed, and give Accelerate's numbers.

The loops are in ``scripts/``. Two CPU ranks run each with one library and then with the other; the
numbers of rank r must be those of Accelerate's.
"""

import math
import warnings

import accelerate
import pytest
import torch

import notebook_accel
from tests.training.harness import on_ranks
from tests.training.scripts import LOOPS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LOOPS)
@on_ranks(2, timeout=200, imports=("transformers.models.gpt2.modeling_gpt2", "peft"))
def test_a_script_gives_accelerates_numbers(name, tmp_path):
    warnings.simplefilter("ignore")
    found = []
    for library in (notebook_accel, accelerate):
        # Accelerate's PartialState() alone makes a world of one on a CPU, whatever was launched.
        state = library.Accelerator(cpu=True).state
        folder = tmp_path / library.__name__
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        state.wait_for_everyone()
        found.append(LOOPS[name](library, folder))
        state.wait_for_everyone()
    assert list(differences(*found)) == []


def differences(ours, theirs, path=""):
    """Where two results differ: numbers by more than the order of sums explains."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        for key in theirs:
            yield from differences(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, (list, tuple)) and len(theirs) == len(ours):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(theirs, float):
        if not math.isclose(theirs, ours, rel_tol=1e-5, abs_tol=1e-7):
            yield path, ours, theirs
    elif theirs != ours:
        yield path, ours, theirs
