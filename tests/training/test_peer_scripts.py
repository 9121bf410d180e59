"""Accelerate's own checks pass with ours in its place.

Its wheel brings the scripts by which its users and its continuous integration try an installation
(``accelerate test``). Here ``accelerate`` is our package and ``accelerate.utils`` our door, and so
on; ``accelerate.test_utils``, where the scripts are, is the library's. One launch runs them all,
one after the other, on one CPU rank and then on two. A check that ours does not pass on purpose is
in ``DIFFERENT`` (docs/from-accelerate.md).
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import itertools
import logging
import os
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import notebook_accel
from notebook_accel.notebook.launcher import debug_launcher
from notebook_accel.rank.this_rank import current
from notebook_accel.training.state import AcceleratorState, PartialState
from tests.public import DOORS
from tests.training.harness import run_ranks

PEER = importlib.util.find_spec("accelerate")
pytestmark = pytest.mark.skipif(PEER is None, reason="accelerate is not installed")

DIFFERENT = {
    "test_pickle_accelerator": "an Accelerator belongs to its process",
    # It gives a mock and says that it is FSDP's; test_accelerator has a model that cannot join.
    "test_join_raises_warning_for_non_ddp_distributed": "ranks on CPUs join, too",
}
# Checks that need another number of ranks, or the network.
LEFT_OUT = {
    1: {
        "check_seedable_sampler_in_batch_sampler_shard",
        "test_distributed_sync",
        "test_distributed_sync_multiple_fwd",
        "test_gradient_accumulation",
        "test_mrpc",
    },
    2: {"test_noop_sync", "test_mrpc"},
}
OF_DATASETS = "test_split_between_processes_dataset"


def stand_in_for_accelerate():
    """Let ours be imported under Accelerate's name in this process, its scripts aside."""
    assert PEER is not None
    assert PEER.submodule_search_locations
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        del sys.modules[name]
    sys.modules["accelerate"] = notebook_accel
    for door in DOORS:
        alias = door.replace("notebook_accel", "accelerate", 1)
        sys.modules[alias] = importlib.import_module(door)
    folder = Path(PEER.submodule_search_locations[0]) / "test_utils"
    spec = importlib.util.spec_from_file_location(
        "accelerate.test_utils", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    tests = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)


def stand_in_for(name):
    """A library that a script imports, and that nothing which runs here needs."""

    def anything(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()

    module = sys.modules[name] = ModuleType(name)
    vars(module).update(__spec__=ModuleSpec(name, None), __getattr__=anything)


def load(name, waiting):
    """A script; the names of its checks are in ``waiting`` until they run."""
    script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    for each, check in inspect.getmembers(script, inspect.isfunction):
        is_check = each.startswith("test_") or "check" in each
        if is_check and check.__module__ == script.__name__:
            waiting.add(each)
            setattr(script, each, noting(check, waiting))
    return script


def noting(check, waiting):
    @functools.wraps(check)
    def run(*args, **kwargs):
        waiting.discard(check.__name__)
        return None if check.__name__ in DIFFERENT else check(*args, **kwargs)

    return run


def run_scripts(folder):
    """All scripts on this rank; gives the names of checks that did not run."""
    os.chdir(folder)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    stand_in_for_accelerate()
    waiting = set()
    with contextlib.redirect_stdout(io.StringIO()):
        sync = run_basics(waiting)
        if os.environ["WORLD_SIZE"] != "1":
            # Its main() tries these on GPUs alone.
            for options in itertools.product([True, False], repeat=3):
                sync.test_gradient_accumulation(*options)
                sync.test_gradient_accumulation_with_opt_and_scheduler(*options)
            run_data_loop(load("test_distributed_data_loop", waiting), folder)
            run_hooks(load("test_ddp_comm_hook", waiting))
        run_metrics(waiting)
    return waiting


def run_in_debug_mode():
    stand_in_for_accelerate()
    is_on = PartialState().debug
    with contextlib.redirect_stdout(io.StringIO()):
        run_basics(set())
    return is_on


def run_basics(waiting):
    load("test_ops", waiting).main()
    load("test_script", waiting).main()
    sync = load("test_sync", waiting)
    # Its data are drawn without a seed: now and then a gradient is so small that rounding shows.
    sync.RegressionDataset = functools.partial(sync.RegressionDataset, seed=42)
    sync.main()
    return sync


def run_data_loop(script, folder):
    script.NUM_WORKERS = 1  # a rank and loader; it asks for four
    # Its ranks save into a folder each; ours write one checkpoint together.
    shared = SimpleNamespace(TemporaryDirectory=lambda: nullcontext(f"{folder}/state"))
    name = "test_join_raises_warning_for_iterable_when_overriding_even_batches"
    told_once = getattr(script, name)

    def told_on_rank_0():
        current().shared.pop("notices shown", None)
        with nullcontext() if current().rank == 0 else pytest.raises(IndexError):
            told_once()

    # It says to be FSDP's for a while, for a check that is in DIFFERENT.
    kind = property(AcceleratorState.distributed_type.fget, lambda *_: None)
    with (
        patch.object(AcceleratorState, "distributed_type", kind),
        patch.object(script, "tempfile", shared),
        patch.object(script, name, told_on_rank_0),
    ):
        script.main()


def run_hooks(script):
    check = script.test_ddp_comm_hook

    def unless_it_needs_nccl(hook, wrapper, options):
        if "bf16" not in (hook, wrapper):
            check(hook, wrapper, options)

    def on_the_host(model, **_):
        return DistributedDataParallel(model)

    with (
        patch.object(script, "test_ddp_comm_hook", unless_it_needs_nccl),
        patch.object(torch.nn.parallel, "DistributedDataParallel", on_the_host),
    ):
        script.main()


def run_metrics(waiting):
    for name in ("datasets", "evaluate", "transformers"):
        stand_in_for(name)
    script = load("external_deps.test_metrics", waiting)
    logging.getLogger("accelerate.accelerator")  # it looks into logging's own table
    # Its main() tries these on GPUs alone.
    script.test_gather_for_metrics_with_iterable_dataset()
    script.test_gather_for_metrics_with_non_tensor_objects_iterable_dataset()
    script.main()


@pytest.mark.parametrize("ranks", LEFT_OUT)
def test_accelerates_own_checks_pass(ranks, tmp_path):
    missing = set() if importlib.util.find_spec("datasets") else {OF_DATASETS}
    results = run_ranks(run_scripts, ranks, str(tmp_path), timeout=100)
    assert results == [LEFT_OUT[ranks] | missing] * ranks


def test_they_pass_in_debug_mode():
    """As Accelerate's own tests call them: by ``debug_launcher``."""
    assert list(debug_launcher(run_in_debug_mode)) == [True, True]
