"""Loops whose data is out of the ordinary."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from tests.training.scripts.parts import (
    Points,
    fingerprint,
    mlp_and_sgd,
    points,
    seeded,
    step_of,
    update,
)


class Stream(IterableDataset):
    """Samples of which nobody knows how many there are."""

    def __init__(self, count: int) -> None:
        self.data = points(count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def train_on(
    accelerate: Any, loader: Any, *, steps: int | None = None, **loading: Any
) -> dict[str, Any]:
    """Train on a loader of pairs; every sample's label is gathered."""
    config = accelerate.DataLoaderConfiguration(**loading)
    accelerator = accelerate.Accelerator(dataloader_config=config)
    model, optimizer = mlp_and_sgd()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    labels_seen: list[int] = []
    losses = []
    for _epoch in range(2):
        for inputs, labels in itertools.islice(loader, steps):
            losses.append(step_of(accelerator, model, optimizer, (inputs, labels)))
            labels_seen += accelerator.gather_for_metrics(labels).tolist()
    return {"losses": losses, "labels": labels_seen, "weights": fingerprint(model)}


def odd_length(accelerate: Any, folder: Path) -> dict[str, Any]:
    """A last round that is filled up, and cut for the metrics."""
    return train_on(accelerate, DataLoader(points(11), batch_size=3))


def divided_batches(accelerate: Any, folder: Path) -> dict[str, Any]:
    """split_batches: the batch size is that of all ranks."""
    return train_on(accelerate, DataLoader(points(14), batch_size=4), split_batches=True)


def dropped_rest(accelerate: Any, folder: Path) -> dict[str, Any]:
    """drop_last with an order of one's own."""
    loader = DataLoader(points(15), batch_size=2, shuffle=True, drop_last=True, generator=seeded(3))
    return train_on(accelerate, loader)


def seedable(accelerate: Any, folder: Path) -> dict[str, Any]:
    """The seedable sampler with a seed for the data."""
    loader = DataLoader(points(13), batch_size=2, shuffle=True)
    return train_on(accelerate, loader, use_seedable_sampler=True, data_seed=9)


def weighted(accelerate: Any, folder: Path) -> dict[str, Any]:
    """A weighted sampler for classes of different sizes."""
    weights = torch.linspace(0.1, 1, 16).tolist()
    sampler = WeightedRandomSampler(weights, 12, generator=seeded(8))
    return train_on(accelerate, DataLoader(points(16), batch_size=2, sampler=sampler))


def stream(accelerate: Any, folder: Path) -> dict[str, Any]:
    """An iterable dataset, read by rank 0 for all."""
    return train_on(accelerate, DataLoader(Stream(12), batch_size=2))


def stream_on_each_rank(accelerate: Any, folder: Path) -> dict[str, Any]:
    """An iterable dataset that every rank reads, taking its own part."""
    return train_on(accelerate, DataLoader(Stream(12), batch_size=2), dispatch_batches=False)


@dataclass
class Batch:
    inputs: torch.Tensor
    labels: torch.Tensor
    names: list[str]


def dataclasses_(accelerate: Any, folder: Path) -> dict[str, Any]:
    """Batches that are dataclasses."""
    accelerator = accelerate.Accelerator()

    def collate(samples: list[Any]) -> Batch:
        inputs = torch.stack([s["pixel_values"] for s in samples])
        labels = torch.stack([s["labels"] for s in samples])
        return Batch(inputs, labels, [f"image {s['index']}" for s in samples])

    model, optimizer = mlp_and_sgd()
    loader = DataLoader(Points(12), batch_size=3, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    names: list[str] = []
    for batch in loader:
        loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels)
        update(accelerator, optimizer, loss)
        names += accelerator.gather_for_metrics(batch.names)
    return {"names": names, "weights": fingerprint(model)}


def two_loaders(accelerate: Any, folder: Path) -> dict[str, Any]:
    """Labelled and unlabelled data beside each other; the shorter one begins again."""
    accelerator = accelerate.Accelerator()
    model, optimizer = mlp_and_sgd()
    labelled, other = DataLoader(points(8), batch_size=2), DataLoader(points(20), batch_size=2)
    model, optimizer, labelled, other = accelerator.prepare(model, optimizer, labelled, other)
    iterator = iter(labelled)
    begun = 1
    for unlabelled, _ in other:
        try:
            inputs, labels = next(iterator)
        except StopIteration:
            iterator = iter(labelled)
            begun += 1
            inputs, labels = next(iterator)
        outputs = model(torch.cat([inputs, unlabelled]))
        loss = nn.functional.cross_entropy(outputs[: len(inputs)], labels)
        loss = loss + 0.1 * outputs[len(inputs) :].softmax(-1).square().sum(-1).mean()
        update(accelerator, optimizer, loss)
    return {"begun": begun, "weights": fingerprint(model)}


def evaluation_inside(accelerate: Any, folder: Path) -> dict[str, Any]:
    """An evaluation every few steps in the middle of an accumulated epoch."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    model, optimizer = mlp_and_sgd()
    train, evaluate = DataLoader(points(20), batch_size=2), DataLoader(points(7), batch_size=2)
    model, optimizer, train, evaluate = accelerator.prepare(model, optimizer, train, evaluate)
    synced, seen = [], []
    for step, (inputs, labels) in enumerate(train):
        with accelerator.accumulate(model):
            step_of(accelerator, model, optimizer, (inputs, labels))
        synced.append(accelerator.sync_gradients)
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                found = [accelerator.gather_for_metrics(model(x).argmax(-1)) for x, _ in evaluate]
            seen.append(len(torch.cat(found)))
            model.train()
    return {"synced": synced, "seen": seen, "weights": fingerprint(model)}


LOOPS = [
    odd_length,
    divided_batches,
    dropped_rest,
    seedable,
    weighted,
    stream,
    stream_on_each_rank,
    dataclasses_,
    two_loaders,
    evaluation_inside,
]
