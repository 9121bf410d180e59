"""How much of a device's memory a sharded model takes while it is prepared, saved and loaded."""

import pytest
import torch

from notebook_accel import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    notebook_launcher,
)
from tests.accelerator.ranks import RANKS

# Of 20 equal layers over two ranks: the half of each, and the layer that is just moved.
_GOAL = 0.6


def _model(*, tied=False):
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(20)]
    if tied:
        layers[1].weight = layers[0].weight
    return torch.nn.Sequential(*layers)


def _accelerator(**plugin):
    return Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1 << 17, **plugin
        )
    )


def _peak(call):
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    call()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


def _peak_of_prepare(how):
    accelerator = _accelerator(cpu_offload=how == "offload")
    with torch.device("meta" if how == "meta" else "cpu"):
        model = _model(tied=how == "tied")
    whole = sum(weight.nbytes for weight in model.parameters())
    objects = [model]
    if how == "optimizer":
        objects.append(torch.optim.SGD(model.parameters(), 0.1))
    if how == "frozen":
        model[:-1].requires_grad_(False)
    peak = _peak(lambda: accelerator.prepare(*objects))
    if how != "meta":  # it trains
        for _ in range(2):
            prepared = accelerator.prepare(model)
            loss = prepared(torch.ones(2, 512, device=accelerator.device)).square().mean()
            accelerator.backward(loss)
    return peak / whole


@pytest.mark.parametrize("how", ["plain", "optimizer", "frozen", "tied", "offload", "meta"])
def test_prepare_never_holds_the_whole_model_on_a_device(how):
    for peak in notebook_launcher(_peak_of_prepare, (how,), num_processes=RANKS, view="none"):
        # The tied layers are gathered with the model itself: one of its units.
        assert peak <= _GOAL + 0.05 * (how == "tied"), peak


def _peak_by_mesh(kind):
    plan = {str(number): "rowwise" if number % 2 else "colwise" for number in range(20)}
    config = ParallelismConfig(tp_size=2, tp_plan=plan) if kind == "tensor" else None
    config = config or ParallelismConfig(pp_size=2, num_microbatches=2)
    accelerator = Accelerator(parallelism_config=config)
    model = _model()
    whole = sum(weight.nbytes for weight in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return _peak(lambda: accelerator.prepare(model, optimizer)) / whole


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_other_strategies_take_their_part_of_a_device(kind):
    for peak in notebook_launcher(_peak_by_mesh, (kind,), num_processes=2, view="none"):
        assert peak <= _GOAL, peak


def _peaks_of_checkpoints(folder):
    accelerator = _accelerator(state_dict_type="SHARDED_STATE_DICT")
    model = _model()
    whole = sum(weight.nbytes for weight in model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    loss = model(torch.ones(2, 512, device=accelerator.device)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    calls = {
        "save_state": lambda: accelerator.save_state(f"{folder}/state"),
        "load_state": lambda: accelerator.load_state(f"{folder}/state"),
        "get_state_dict": lambda: accelerator.get_state_dict(model),
        "save_model": lambda: accelerator.save_model(model, f"{folder}/model"),
    }
    return {name: _peak(call) / whole for name, call in calls.items()}


def test_full_weights_are_never_whole_on_a_device(tmp_path):
    run = notebook_launcher(
        _peaks_of_checkpoints, (str(tmp_path),), num_processes=RANKS, view="none"
    )
    for peaks in run:
        assert max(peaks.values()) <= 0.15, peaks
