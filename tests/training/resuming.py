"""The loop of the documentation, whose one line begins a training or goes on with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.training.meshes import LAYOUTS, accelerator_for, data, loss_of, make


def train(
    folder: Path | str,
    layout: str | None = None,
    *,
    samples: int,
    epochs: int = 2,
    window: int = 2,
    saves: Callable[[int], bool],
    in_background: bool = False,
    stop: int = 0,
    dropout: bool = False,
) -> dict[str, Any]:
    """Train from where ``folder`` is; return where it began, losses by epoch and batch, saves.

    ``saves`` gets the batches of this attempt; it ends after ``stop`` batches (0: at the end).
    With ``dropout``, each loss draws random numbers.
    """

    def criterion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(torch.nn.functional.dropout(outputs, training=dropout), targets)

    accelerator = accelerator_for(layout, gradient_accumulation_steps=window)
    model, made = make({})
    size = 2 // LAYOUTS[layout][1]  # as many batches under each layout
    loader = DataLoader(data(samples), batch_size=size, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(made, 2)
    model, made, loader, schedule = accelerator.prepare(model, made, loader, schedule)
    start = accelerator.resume_or_start(folder)
    losses: dict[str, float] = {}
    saved: list[str] = []
    for epoch in range(start.epoch, epochs):
        begin = start.batch if epoch == start.epoch else 0
        for batch, (inputs, targets) in enumerate(loader, begin):
            with accelerator.accumulate(model):
                loss = accelerator.forward_backward(model, inputs, targets, criterion)
                made.step()
                schedule.step()
                made.zero_grad()
            losses[f"{epoch} {batch}"] = float(accelerator.reduce(loss, "mean"))
            if saves(len(losses)):
                saved.append(Path(accelerator.save_state(async_save=in_background)).name)
            if len(losses) == stop:
                break
        if len(losses) == stop:
            break
    accelerator.wait_for_checkpoint()
    return {"start": start, "losses": losses, "saved": saved}
