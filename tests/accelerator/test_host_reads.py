"""How often the host reads from its device in a step, beside a loop of plain torch."""

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from notebook_accel import Accelerator, GradScalerKwargs, notebook_launcher

_DEVICE = str(torch.accelerator.current_accelerator())
_STEPS = 4
# What each loop does in a step: the optimizer is fused, gradients are clipped.
CASES = [*product((True, False), (True, False))]


class _Reads(TorchDispatchMode):
    """Counts what brings a value of the device to the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        if func is torch.ops.aten.copy_.default:
            tensors = tensors[1:]
        of_device = any(one.device.type == _DEVICE for one in tensors)
        is_read = isinstance(out, (bool, int, float)) or (
            isinstance(out, torch.Tensor) and out.device.type == "cpu"
        )
        self.count += of_device and is_read
        return out


def _made(is_fused):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4).to(_DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=is_fused)


def _count(precision, is_fused, clips):
    accelerator = Accelerator(mixed_precision=precision)
    model, optimizer = accelerator.prepare(*_made(is_fused))
    batch = torch.ones(2, 4, device=_DEVICE)
    with _Reads() as reads:
        for _ in range(_STEPS):
            loss = model(batch).float().square().mean()
            accelerator.backward(loss)
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.num_steps == _STEPS
    return reads.count


def _count_all(precision):
    return [_count(precision, *case) for case in CASES]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_step_reads_no_more_from_the_device_than_a_plain_loop(precision):
    (counted,) = notebook_launcher(_count_all, (precision,), num_processes=1, view="none")
    # Torch's own scaler reads to decide whether an optimizer steps that is not fused.
    assert counted == [_STEPS * (precision == "fp16" and not fused) for fused, _ in CASES]


def _overflow(is_fused):
    scale = GradScalerKwargs(init_scale=1024.0)
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scale])
    model, optimizer = _made(is_fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    said = []
    for factor in (1.0, float("inf"), 1.0):
        before = model.weight.detach().clone()
        loss = model(torch.ones(2, 4, device=_DEVICE)).float().square().mean()
        accelerator.backward(loss * factor)
        optimizer.step()
        scheduler.step()
        moved = not torch.equal(before, model.weight)
        said.append((moved, optimizer.step_was_skipped, scheduler.get_last_lr()[0]))
        optimizer.zero_grad()
    return [*said, optimizer.num_steps]


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_skipped_step_is_known_once_it_is_asked_for(is_fused):
    (said,) = notebook_launcher(_overflow, (is_fused,), num_processes=1, view="none")
    assert said == [(True, False, 0.05), (False, True, 0.05), (True, False, 0.025), 2]
