"""Loops of image scripts: timm-like training, detection, GANs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from tests.training.scripts.parts import Points, fingerprint, mlp, points, seeded, update


def cv_example(accelerate: Any, folder: Path) -> dict[str, Any]:
    """timm-like: a frozen backbone, normalised batches, OneCycleLR, accuracy with gather."""
    config = {"lr": 3e-2, "num_epochs": 2, "seed": 42, "batch_size": 3}
    accelerator = accelerate.Accelerator(mixed_precision="no")
    accelerate.utils.set_seed(config["seed"])
    loader = DataLoader(
        Points(18), shuffle=True, batch_size=config["batch_size"], generator=seeded(4)
    )
    eval_loader = DataLoader(Points(11), shuffle=False, batch_size=config["batch_size"])
    model = nn.Sequential(mlp(4, 8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    for weight in model[0].parameters():
        weight.requires_grad = False
    mean = torch.zeros(1, 4).to(accelerator.device)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer=optimizer, max_lr=config["lr"], epochs=2, steps_per_epoch=len(loader)
    )
    model, optimizer, loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, loader, eval_loader, schedule
    )
    accuracy = []
    for _ in range(config["num_epochs"]):
        model.train()
        for batch in loader:
            inputs, labels = (batch[k].to(accelerator.device) for k in ("pixel_values", "labels"))
            loss = nn.functional.cross_entropy(model(inputs - mean), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        accurate, num_elems = 0, 0
        for batch in eval_loader:
            with torch.no_grad():
                predictions = model(batch["pixel_values"]).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum().item()
        accuracy.append([accurate, num_elems])
    return {
        "accuracy": accuracy,
        "rate": optimizer.param_groups[0]["lr"],
        "weights": fingerprint(model),
    }


def gan(accelerate: Any, folder: Path) -> dict[str, Any]:
    """Two models, two optimizers, two schedules, and a detached half."""
    accelerator = accelerate.Accelerator()
    maker, critic = mlp(4, 8, 4), mlp(4, 8, 1)
    for_maker = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.999))
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.999))
    rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (for_maker, for_critic)]
    maker, critic, for_maker, for_critic, loader, *rates = accelerator.prepare(
        maker, critic, for_maker, for_critic, DataLoader(points(16), batch_size=2), *rates
    )
    judge = nn.BCEWithLogitsLoss()
    noise_of = seeded(accelerator.process_index)
    losses = []
    for real, _ in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        noise = torch.randn(real.shape, generator=noise_of)
        for_critic.zero_grad()
        fake = maker(noise)
        loss = judge(critic(real), ones) + judge(critic(fake.detach()), zeros)
        accelerator.backward(loss)
        for_critic.step()
        for_maker.zero_grad()
        loss_of_maker = judge(critic(fake), ones)
        accelerator.backward(loss_of_maker)
        for_maker.step()
        for rate in rates:
            rate.step()
        losses.append([loss.item(), loss_of_maker.item()])
    return {
        "losses": losses,
        "rates": [rate.get_last_lr()[0] for rate in rates],
        "weights": fingerprint(maker) + fingerprint(critic),
    }


class Boxes(torch.utils.data.Dataset):
    """Images with boxes, of which some have none."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        image = torch.full((4,), float(index))
        count = index % 3
        return image, {"boxes": torch.ones(count, 4) * index, "image_id": torch.tensor(index)}


def detection(accelerate: Any, folder: Path) -> dict[str, Any]:
    """Lists of targets, images without a box, predictions of any number, gathered as objects."""
    accelerator = accelerate.Accelerator()
    model = mlp(4, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def collate(samples: list[Any]) -> tuple[Any, ...]:
        return tuple(zip(*samples, strict=True))

    loader = DataLoader(Boxes(), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    for images, targets in loader:
        predicted = model(torch.stack(list(images)))
        parts = {
            "box": sum(
                ((p - t["boxes"]) ** 2).mean() if len(t["boxes"]) else p.sum() * 0
                for p, t in zip(predicted, targets, strict=True)
            ),
            "size": predicted.square().mean(),
        }
        loss = sum(parts.values())
        reduced = {
            name: accelerator.reduce(value.detach(), "mean") for name, value in parts.items()
        }
        losses += [float(value) for value in reduced.values()]
        update(accelerator, optimizer, loss)
    model.eval()
    results: list[Any] = []
    for _images, targets in loader:
        own = [
            {"image_id": int(t["image_id"]), "boxes": t["boxes"].tolist()}
            for t in targets
            if len(t["boxes"])
        ]
        results += accelerate.utils.gather_object(own)
    ids = sorted({result["image_id"] for result in results})
    return {"losses": losses, "ids": ids, "weights": fingerprint(model)}


class Buckets(BatchSampler):
    """Batches of samples of one width: images of one aspect ratio."""

    def __init__(self, widths: list[int], size: int) -> None:
        super().__init__(torch.utils.data.SequentialSampler(widths), size, drop_last=False)
        self.widths = widths

    def __iter__(self) -> Iterator[list[int]]:
        for width in sorted(set(self.widths)):
            own = [index for index, each in enumerate(self.widths) if each == width]
            for start in range(0, len(own), self.batch_size):
                yield own[start : start + self.batch_size]

    def __len__(self) -> int:
        return len(list(iter(self)))


def aspect_ratios(accelerate: Any, folder: Path) -> dict[str, Any]:
    """A batch sampler of one's own whose batches are divided over the ranks without a rest."""
    widths = [2, 3, 4, 4] * 4
    accelerator = accelerate.Accelerator()
    data = [torch.full((width,), float(index)) for index, width in enumerate(widths)]
    loader = DataLoader(data, batch_sampler=Buckets(widths, 2))  # type: ignore[arg-type]
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    shapes, seen = [], []
    for batch in loader:
        update(accelerator, optimizer, model(batch.mean(dim=1, keepdim=True)).square().mean())
        shapes.append(list(batch.shape))
        seen += batch[:, 0].tolist()
    return {"shapes": shapes, "seen": seen, "weights": fingerprint(model)}


LOOPS = [cv_example, gan, detection, aspect_ratios]
