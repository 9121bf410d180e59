"""Commands as a person types them, and the script that they launch."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
    *command: str,
    folder: Path,
    timeout: float = 280,
    python: tuple[str, ...] = (sys.executable,),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "XDG_CONFIG_HOME": str(folder),
        "XDG_CACHE_HOME": str(folder),
        "HF_HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        **variables,
    }
    return subprocess.run(
        [*python, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def notebook_accel(
    *arguments: str, folder: Path, timeout: float = 280, **variables: str
) -> subprocess.CompletedProcess[str]:
    return run("-m", "notebook_accel", *arguments, folder=folder, timeout=timeout, **variables)


def losses(done: subprocess.CompletedProcess[str]) -> tuple[str, list[float]]:
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.removeprefix("[rank 0] ") for line in done.stdout.splitlines()]
    (said,) = [line.removeprefix("said: ") for line in lines if line.startswith("said: ")]
    (text,) = [line.removeprefix("losses: ") for line in lines if line.startswith("losses: ")]
    return said, [float(number) for number in text.strip("[]").split(",")]
