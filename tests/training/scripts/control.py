"""A loop that is resumed in the middle of an epoch."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.training.scripts.parts import fingerprint, mlp, points, step_of


def train_with_resume(
    accelerate: Any, folder: Path, resume: str | None, stop_at: int | None
) -> dict[str, Any]:
    """complete_nlp_example: checkpoints every few steps, and a resume in the middle of an epoch."""
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    accelerator = accelerate.Accelerator(dataloader_config=config)
    accelerate.utils.set_seed(1)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(points(20), shuffle=True, batch_size=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    overall_step = starting_epoch = 0
    resume_step = None
    if resume is not None:
        accelerator.print(f"Resumed from checkpoint: {resume}")
        accelerator.load_state(str(folder / resume))
        overall_step = int(resume.replace("step_", ""))
        starting_epoch = overall_step // len(loader)
        resume_step = overall_step - starting_epoch * len(loader)
    losses = []
    for epoch in range(starting_epoch, 3):
        model.train()
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        if resume is not None and epoch == starting_epoch and resume_step is not None:
            active = accelerator.skip_first_batches(loader, resume_step)
            overall_step_before = overall_step
            assert overall_step_before == overall_step
        else:
            active = loader
        for batch in active:
            losses.append(step_of(accelerator, model, optimizer, batch))
            schedule.step()
            overall_step += 1
            if overall_step % 4 == 0:
                accelerator.save_state(str(folder / f"step_{overall_step}"))
                accelerator.wait_for_everyone()
            if overall_step == stop_at:
                return {}
    return {"losses": losses, "rate": schedule.get_last_lr(), "weights": fingerprint(model)}


def resume_in_mid_epoch(accelerate: Any, folder: Path) -> dict[str, Any]:
    """Stopped after step 9 and resumed from step 8, in the second of three epochs of 5."""
    whole = train_with_resume(accelerate, folder, None, None)
    train_with_resume(accelerate, folder, None, 9)
    resumed = train_with_resume(accelerate, folder, "step_8", None)
    return {
        "whole": whole,
        "resumed": resumed,
        "exact": resumed["losses"] == whole["losses"][8:],
        "same weights": resumed["weights"] == whole["weights"],
    }


LOOPS = [resume_in_mid_epoch]
