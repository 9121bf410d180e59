"""Trainings for ranks of torch_xla, and for one process on the CPU, which must come to the same."""

import copy

import torch


def new_model() -> torch.nn.Module:
    """Two layers; made once, since ranks that are threads share the host's random numbers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))


def samples() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(64, 8, generator=generator), torch.randn(64, 2, generator=generator)
    )


def train(
    model: torch.nn.Module,
    kind: str = "SGD",
    *,
    clips: bool = False,
    num_steps: int = 1,
    precision: str = "no",
    is_bare: bool = False,
) -> tuple[list[float], list[torch.Tensor]]:
    """Train for two epochs; return the losses, meaned over the ranks, and the weights.

    ``is_bare`` leaves the optimizer unprepared, as one article does.
    """
    from notebook_accel import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=num_steps, mixed_precision=precision)
    own = copy.deepcopy(model)
    optimizer = getattr(torch.optim, kind)(own.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(samples(), batch_size=8 // accelerator.num_processes)
    prepared, loader = accelerator.prepare(own, loader)
    if not is_bare:
        optimizer = accelerator.prepare(optimizer)
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(prepared):
                loss = torch.nn.functional.mse_loss(prepared(inputs), targets)
                accelerator.backward(loss)
                if clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses, [weight.detach().cpu() for weight in prepared.parameters()]
