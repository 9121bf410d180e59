"""Every strategy on GPUs equals one process on the CPU.

Trainings and twins are those of ``test_matrix``, which runs them on the CPU. Single precision there
and here rounds sums and tanh at other places: some ten times what the order of sums alone does.
"""

import pytest
import torch

from notebook_accel import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    notebook_launcher,
)
from tests.training import inductor, meshes, test_matrix

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "strategy", [name for name in test_matrix.STRATEGIES if test_matrix.kind_of(name) != "parts"]
)
def test_a_strategy_on_gpus_equals_one_process(strategy):
    ranks, _, _ = test_matrix.STRATEGIES[strategy]
    if torch.accelerator.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")

    def train():
        return test_matrix.train_all([strategy], names=meshes.ROUNDING, cpu=False)[strategy]

    for of_rank in notebook_launcher(train, num_processes=ranks, view="none"):
        for name, ours in of_rank.items():
            test_matrix.check(strategy, name, ours, 10 * meshes.FLOAT_ERROR)


@pytest.mark.real_gpu
def test_what_inductor_builds_trains():
    run = notebook_launcher(inductor.train_blocks, ("single", False), num_processes=1, view="none")
    inductor.check(*run[0], 1)


def _read_by_default_on_the_gpu(kind, save_dir):
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
    if torch.accelerator.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    run = notebook_launcher(
        _read_by_default_on_the_gpu, (kind, str(tmp_path / "s")), num_processes=ranks, view="none"
    )
    assert sorted(sample for samples, _ in run for sample in samples) == [0, 1, 2, 3, 4, 5]
    assert [device for _, device in run] == [f"{kind}:{rank}" for rank in range(ranks)]


def _resume_fused(folder):
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
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
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two GPUs")
    run = notebook_launcher(_resume_fused, (str(tmp_path / "s"),), num_processes=2, view="none")
    assert run.results == [(kind, "cpu")] * 2
