"""A private name of torch that is gone turns its feature off, with one line; training goes on."""

import logging
import os
import re
from pathlib import Path

import torch
from torch import nn

from notebook_accel.private import of_torch
from notebook_accel.training.strategies.compiling import compile_regions
from tests.training import meshes
from tests.training.harness import on_ranks

SOURCE = Path(of_torch.__file__).read_text()
# Names that a function of ours replaces in torch, and reports in the launch's log if it cannot.
NAMES = sorted(set(re.findall(r"\b_(?!_)\w*[A-Za-z]\w*", SOURCE)) - vars(of_torch).keys())


def without(name):
    """Have ``of_torch`` ask for a name that no torch has."""
    altered = re.sub(rf"\b{name}\b", f"_gone{name}", SOURCE)
    exec(compile(altered, of_torch.__file__, "exec"), vars(of_torch))


def train(folder):
    case = {"accumulate": 2, "clip": 1.0, "samples": 8, "settings": {"rng_types": []}}
    seen = meshes.train("fsdp", case)
    accelerator = meshes.accelerator_for("fsdp")
    model, optimizer = accelerator.prepare(*meshes.make(case))
    tokens, _ = meshes.data(2).tensors
    with accelerator.no_sync(model):
        accelerator.backward(model(tokens).sum())
    optimizer.optimizer.zero_grad()
    optimizer.zero_grad()
    accelerator.save_state(folder)
    of_torch.set_rotate_method("allgather")
    weight = next(model.parameters())
    of_torch.at_other_device(weight, torch.zeros_like(weight.to_local()))
    of_torch.flatten_mesh(weight.device_mesh, "all")
    of_torch.untyped_storage(torch.storage.TypedStorage(4, dtype=torch.uint8))
    blocks = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    compile_regions(nn.Sequential(blocks), backend="eager")
    of_torch.count_of_changes(torch.ones(1))
    of_torch.overflow(torch.amp.GradScaler("cpu"), torch.optim.SGD(blocks.parameters()))
    of_torch.unscale_by(type("Scaler", (torch.amp.GradScaler,), {}), lambda *_: {})
    of_torch.loadable_names()
    return seen


@on_ranks(2, timeout=110)
def test_training_goes_on_without_each_private_name(tmp_path):
    lines, reported = [], set()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("notebook_accel").addHandler(handler)
    expected = train(tmp_path / "whole")
    assert lines == []
    for name in NAMES:
        without(name)
        assert train(tmp_path / name) == expected, name
        assert len(lines) <= 1, name
        if lines:
            reported.add(name)
            lines.clear()
    common = {"_flatten", "_found_inf_per_device", "_modules", "_spec", "_version"}
    assert common <= reported or os.environ["RANK"] != "0"
    assert {"_unsharded_param", *common} <= {*NAMES}
