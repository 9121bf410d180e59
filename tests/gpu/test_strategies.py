"""Every strategy on GPUs equals one process on the CPU.

Trainings and twins are those of ``test_matrix``, which runs them on the CPU. Single precision there
and here rounds sums and tanh at other places: some ten times what the order of sums alone does.
"""

import pytest

from notebook_accel import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    notebook_launcher,
)
from tests.training.inductor import train_blocks
from tests.training.meshes import FLOAT_ERROR
from tests.training.test_matrix import STRATEGIES, check, precisions_of, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def _train_all(strategy):
    return {name: train(strategy, name, cpu=False) for name in precisions_of(strategy)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_on_gpus_equals_one_process(strategy):
    import torch

    ranks, _, _ = STRATEGIES[strategy]
    if torch.accelerator.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for of_rank in notebook_launcher(_train_all, (strategy,), num_processes=ranks, view="none"):
        for precision, ours in of_rank.items():
            check(strategy, precision, ours, 10 * FLOAT_ERROR)


@pytest.mark.real_gpu
def test_what_inductor_builds_trains():
    import torch

    (result,) = notebook_launcher(train_blocks, (False,), num_processes=1, view="none")
    assert result["graphs"] == 1
    for name, value in result["NO"].items():
        torch.testing.assert_close(result["INDUCTOR"][name], value, atol=1e-5, rtol=0)


def _read_by_default_on_the_gpu(kind, save_dir):
    import torch

    torch.set_default_device(kind)
    accelerator = Accelerator()
    # Of several ranks, rank 0 reads for all.
    config = DataLoaderConfiguration(dispatch_batches=accelerator.num_processes > 1)
    accelerator.dataloader_config = config
    data = torch.utils.data.TensorDataset(torch.arange(6.0, device="cpu"))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    loader, _ = accelerator.prepare(loader, torch.nn.Linear(2, 2))
    batches = [batch for (batch,) in loader]
    accelerator.save_state(save_dir, async_save=True)
    accelerator.end_training()
    return sorted(torch.cat(batches).tolist()), str(batches[0].device)


@pytest.mark.parametrize("ranks", [1, 2])
def test_loaders_and_checkpoints_with_the_gpu_as_torchs_default(tmp_path, kind, ranks):
    import torch

    if torch.accelerator.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    run = notebook_launcher(
        _read_by_default_on_the_gpu, (kind, str(tmp_path / "s")), num_processes=ranks, view="none"
    )
    assert sorted(sample for samples, _ in run for sample in samples) == [0, 1, 2, 3, 4, 5]
    assert [device for _, device in run] == [f"{kind}:{rank}" for rank in range(ranks)]


def _resume_fused(folder):
    import torch

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 8, device=accelerator.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(folder)
        accelerator.load_state(folder)
    weight = next(iter(model.parameters()))
    torch.accelerator.synchronize()
    whole = accelerator.get_state_dict(model)["weight"]
    return optimizer.state[weight]["step"].device.type, whole.device.type


def test_a_fused_optimizer_goes_on_from_a_sharded_checkpoint(tmp_path, kind):
    import torch

    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two GPUs")
    run = notebook_launcher(_resume_fused, (str(tmp_path / "s"),), num_processes=2, view="none")
    assert run.results == [(kind, "cpu")] * 2


def _peak_of_prepare():
    """How far a GPU's memory rises as a model is sharded, and the bytes of the model."""
    import torch

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1 << 20
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))
    whole = sum(weight.nbytes for weight in model.parameters())
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    accelerator.prepare(model)
    return torch.accelerator.max_memory_allocated() - before, whole


def test_a_model_is_sharded_without_room_for_all_of_it():
    import torch

    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two GPUs")
    for peak, whole in notebook_launcher(_peak_of_prepare, num_processes=2, view="none"):
        assert peak < 0.75 * whole, "half of it, and a layer or two"
