"""A training that is resumed sees the batches that it would have seen."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from notebook_accel import Accelerator, DataLoaderConfiguration
from notebook_accel.training.processes.random_numbers import set_seed
from tests.training.harness import on_ranks


def test_a_loop_that_is_under_way_is_left_alone(tmp_path):
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(range(20), batch_size=2, shuffle=True)
    _, loader = accelerator.prepare(nn.Linear(1, 1), loader)
    for index, _ in enumerate(loader):
        if index == 2:
            accelerator.save_state(tmp_path / "good")
        if index == 5:
            with pytest.warns(UserWarning, match=r"leaves loader 1 of .* a loop over it"):
                accelerator.load_state(tmp_path / "good")
    assert index == 9
    assert len(list(loader)) == 10


def draw():
    """An augmentation in worker processes: of each of the random numbers that samples draw from."""
    if get_worker_info() is None:
        return 0.0
    return float(torch.rand(1)) + float(np.random.rand()) + random.random()


class Augmented(Dataset[torch.Tensor]):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.tensor([index + draw()])


class AugmentedStream(IterableDataset[torch.Tensor]):
    def __iter__(self):
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (torch.tensor([index + draw()]) for index in range(start, 23, step))


class OwnOrder(Sampler[int]):
    """A sampler that draws from the global random numbers, and has no generator to be given."""

    def __iter__(self):
        return iter(np.random.permutation(23).tolist())


# Dataset, loader, DataLoaderConfiguration.
AUGMENTED = {
    "map": (Augmented, {"shuffle": True}, {}),
    "seedable": (Augmented, {"shuffle": True}, {"use_seedable_sampler": True}),
    "own order": (Augmented, {"sampler": OwnOrder()}, {}),
    "workers": (Augmented, {"shuffle": True, "num_workers": 2}, {}),
    "workers that stay": (
        Augmented,
        {"shuffle": True, "num_workers": 2, "persistent_workers": True},
        {},
    ),
    "stream": (AugmentedStream, {}, {"dispatch_batches": False}),
    "stream, workers": (AugmentedStream, {"num_workers": 2}, {"dispatch_batches": False}),
    "stateful": (Augmented, {}, {"use_stateful_dataloader": True}),
}
# After which batches each is saved: of the first and second epoch of six, and at their ends.
SAVES = dict.fromkeys(AUGMENTED, (3,)) | dict.fromkeys(("map", "seedable"), (3, 5, 6, 7, 12))
SAVES |= dict.fromkeys(("own order", "workers that stay"), (8,))
OF_TWO_RANKS = {
    **{name: AUGMENTED[name] for name in ("map", "workers", "stream")},
    "map, dispatched": (Augmented, {"shuffle": True}, {"dispatch_batches": True}),
    "split": (Augmented, {"shuffle": True}, {"dispatch_batches": True, "split_batches": True}),
    "workers, dispatched": (Augmented, {"num_workers": 2}, {"dispatch_batches": True}),
    "stream, dispatched": (AugmentedStream, {}, {}),
}


def learn(case, folder, save_at):
    """Two epochs whose steps draw random numbers too; resumed where there is a checkpoint."""
    kind, loading, config = case
    set_seed(1 if save_at else 2, device_specific=True)
    settings = DataLoaderConfiguration(**config)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(kind(), batch_size=4, **loading)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start = accelerator.resume_or_start(folder)
    losses = []
    for _ in range(start.epoch, 2):
        for batch in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if len(losses) == save_at:
                accelerator.save_state(folder)
    return losses


@pytest.mark.parametrize(
    ("name", "save_at"), [(name, number) for name, numbers in SAVES.items() for number in numbers]
)
def test_losses_are_those_of_a_run_that_was_never_stopped(name, save_at, tmp_path):
    whole = learn(AUGMENTED[name], tmp_path / "run", save_at)
    assert learn(AUGMENTED[name], tmp_path / "run", None) == whole[save_at:]


@pytest.mark.parametrize("name", OF_TWO_RANKS)
@on_ranks(2)
def test_so_are_those_of_two_ranks_however_they_share_the_data(name, tmp_path):
    whole = learn(OF_TWO_RANKS[name], tmp_path, 2)
    assert learn(OF_TWO_RANKS[name], tmp_path, None) == whole[2:]
