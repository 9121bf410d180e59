"""Loops that leave early, resume, save in their own way, or train without a loader."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training.scripts.parts import (
    fingerprint,
    gpt2,
    mlp,
    mlp_and_sgd,
    points,
    seeded,
    step_of,
    update,
)

if TYPE_CHECKING:
    from pathlib import Path


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


def early_stopping(accelerate: Any, folder: Path) -> dict[str, Any]:
    """A rank asks all to stop by set_trigger; the loop is left in the middle."""
    accelerator = accelerate.Accelerator()
    model, optimizer = mlp_and_sgd()
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(points(24), batch_size=2)
    )
    steps = 0
    for batch in loader:
        step_of(accelerator, model, optimizer, batch)
        steps += 1
        if steps == 3 and accelerator.is_last_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return {"steps": steps, "again": accelerator.check_trigger(), "weights": fingerprint(model)}


def hub(accelerate: Any, folder: Path) -> dict[str, Any]:
    """The model for the hub: save_pretrained with the accelerator's save and state."""
    accelerator = accelerate.Accelerator()
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(1, 20, (8, 5), generator=seeded())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(ids, batch_size=2))
    for batch in loader:
        update(accelerator, optimizer, model(input_ids=batch, labels=batch).loss)
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder / "hub",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.save_model(model, str(folder / "weights"), max_shard_size="1KB")
    accelerator.wait_for_everyone()
    loaded = type(unwrapped).from_pretrained(folder / "hub")
    return {
        "loaded": fingerprint(loaded),
        "weights": fingerprint(model),
        "files": sorted(os.listdir(folder / "weights"))[-1],
    }


def no_sync(accelerate: Any, folder: Path) -> dict[str, Any]:
    """Accumulation written by hand with no_sync, and the norm clipped at its end."""
    accelerator = accelerate.Accelerator()
    model, optimizer = mlp_and_sgd()
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(points(24), batch_size=2)
    )
    norms = []
    for index, (inputs, labels) in enumerate(loader):
        if (index + 1) % 3:
            with accelerator.no_sync(model):
                loss = nn.functional.cross_entropy(model(inputs), labels) / 3
                accelerator.backward(loss)
            continue
        loss = nn.functional.cross_entropy(model(inputs), labels) / 3
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "weights": fingerprint(model)}


def policy(accelerate: Any, folder: Path) -> dict[str, Any]:
    """TRL-like: rollouts, whitened over the ranks, several epochs of minibatches, two heads."""
    accelerator = accelerate.Accelerator()

    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.value = mlp(), mlp(4, 4, 1)

        def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.policy(inputs), self.value(inputs).squeeze(-1)

    model = ActorCritic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    queries = accelerator.prepare(DataLoader(points(16).tensors[0], batch_size=4))
    model, optimizer = accelerator.prepare(model, optimizer)
    stats = []
    for states in queries:
        with torch.no_grad():
            logits, values = model(states)
            actions = logits.argmax(-1)
            old = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
            rewards = states.sum(-1)
            every = accelerator.gather(rewards)
            advantages = (rewards - every.mean()) / (every.std() + 1e-8) - values
        for _ in range(2):
            for start in range(0, len(states), 2):
                part = slice(start, start + 2)
                with accelerator.accumulate(model):
                    logits, values = model(states[part])
                    new = logits.log_softmax(-1).gather(1, actions[part, None])[:, 0]
                    ratio = (new - old[part]).exp()
                    clipped = ratio.clamp(0.8, 1.2)
                    gain = torch.min(ratio * advantages[part], clipped * advantages[part])
                    loss = -gain.mean() + 0.1 * (values - rewards[part]).square().mean()
                    update(accelerator, optimizer, loss)
        stats.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"stats": stats, "weights": fingerprint(model)}


def processes(accelerate: Any, folder: Path) -> dict[str, Any]:
    """Inference without a loader: split_between_processes, decorators, main process first."""
    accelerator = accelerate.Accelerator()
    state = accelerate.PartialState()
    written = folder / "cache.txt"
    with accelerator.main_process_first():
        if not written.exists():
            written.write_text("of the first")

    @accelerator.on_main_process
    def of_main() -> str:
        return "main"

    @state.on_last_process
    def of_last() -> str:
        return "last"

    with state.split_between_processes(["a", "b", "c"], apply_padding=False) as prompts:
        own = [prompt * 2 for prompt in prompts]
    with accelerator.split_between_processes({"x": torch.arange(4), "y": list("wxyz")}) as part:
        pairs = list(zip(part["x"].tolist(), part["y"], strict=True))
    accelerator.wait_for_everyone()
    results = accelerate.utils.gather_object(own)
    shared = [{"seed": accelerator.process_index}]
    accelerate.utils.broadcast_object_list(shared, from_process=1 % accelerator.num_processes)
    return {
        "results": results,
        "pairs": accelerate.utils.gather_object(pairs),
        "decorated": [of_main(), of_last()],
        "shared": shared,
        "cache": written.read_text(),
        "sum": accelerate.utils.reduce(torch.ones(2), reduction="sum").tolist(),
        "widest": accelerator.pad_across_processes(
            torch.ones(1 + accelerator.process_index), dim=0
        ).tolist(),
    }


def memory(accelerate: Any, folder: Path) -> dict[str, Any]:
    """find_executable_batch_size around a whole inner loop."""
    accelerator = accelerate.Accelerator()
    tried = []

    @accelerate.utils.find_executable_batch_size(starting_batch_size=8)
    def inner(batch_size: int) -> list[float]:
        accelerator.free_memory()
        tried.append(batch_size)
        if batch_size > 6:
            raise RuntimeError("CUDA out of memory.")
        model, optimizer = mlp_and_sgd()
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(points(12), batch_size=batch_size)
        )
        for batch in loader:
            step_of(accelerator, model, optimizer, batch)
        return fingerprint(model)

    return {"weights": inner(), "tried": tried}


LOOPS = [
    resume_in_mid_epoch,
    early_stopping,
    hub,
    no_sync,
    policy,
    processes,
    memory,
]
