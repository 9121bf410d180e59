"""Commands as a person types them, and the script that they launch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Done = subprocess.CompletedProcess[str]
# The loop of the tutorials, as a function for notebooks and as a script.
SCRIPT = """
import torch
from notebook_accel import Accelerator
from notebook_accel.utils import set_seed

def main():
    set_seed(42)
    accelerator = Accelerator()
    torch.nn.Dropout()
    inputs = torch.randn(48, 6)
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
    train_dataloader = torch.utils.data.DataLoader(data, shuffle=True, batch_size=4)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    num_steps = 2 * len(train_dataloader)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_steps)
    train_dataloader, model, optimizer, lr_scheduler = accelerator.prepare(
        train_dataloader, model, optimizer, lr_scheduler
    )
    losses = []
    for epoch in range(2):
        for batch, labels in train_dataloader:
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    kind = accelerator.distributed_type.value
    facts = f"{accelerator.num_processes} {kind} {accelerator.mixed_precision}"
    accelerator.print(f"said: {facts} {accelerator.gradient_accumulation_steps}")
    accelerator.print(f"losses: {losses}")
    return losses

if __name__ == "__main__":
    main()
"""


def run(
    *command: str, folder: Path, python: tuple[str, ...] = (sys.executable,), **variables: str
) -> Done:
    homes = dict.fromkeys(("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HF_HOME"), str(folder))
    environment = {**os.environ, **homes, "PYTHONPATH": str(ROOT), **variables}
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 280}
    return subprocess.run([*python, *command], cwd=folder, env=environment, check=False, **how)


def notebook_accel(*arguments: str, folder: Path, **variables: str) -> Done:
    return run("-m", "notebook_accel", *arguments, folder=folder, **variables)


def losses(done: Done) -> tuple[str, list[float]]:
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.removeprefix("[rank 0] ") for line in done.stdout.splitlines()]
    (said,) = [line.removeprefix("said: ") for line in lines if line.startswith("said: ")]
    (text,) = [line.removeprefix("losses: ") for line in lines if line.startswith("losses: ")]
    return said, [float(number) for number in text.strip("[]").split(",")]
