"""Loops of image scripts: timm-like training, GANs."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training.scripts.parts import Points, fingerprint, mlp, points, seeded


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


LOOPS = [cv_example, gan]
