"""``Accelerator()`` in plain Python, without a launcher: one rank on torch_xla's CPU device."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from notebook_accel import Accelerator, set_seed

accelerator = Accelerator(mixed_precision="bf16", project_dir=sys.argv[1])
print("torch_xla" in sys.modules, accelerator.device, accelerator.distributed_type.value)
print(accelerator.is_main_process, accelerator.num_processes, accelerator.state.backend)

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.last = torch.nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
    def forward(self, x):
        return self.last(torch.relu(self.first(x)))

set_seed(3)
drawn = torch.rand(2, device=accelerator.device).cpu()
set_seed(3)
print("seeded", torch.equal(drawn, torch.rand(2, device=accelerator.device).cpu()))

model = Tied()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
loader = DataLoader(TensorDataset(torch.randn(10, 4), torch.randn(10, 4)), batch_size=5)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
inner = accelerator.unwrap_model(model)
print("tied", inner.first.weight is inner.last.weight, inner.first.weight.device)
start = inner.first.weight.detach().cpu()

def epoch():
    for inputs, targets in accelerator.progress(loader, "batches"):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss})

epoch()
print("gathered", len(accelerator.gather_for_metrics(torch.arange(5))))
accelerator.save_state(sys.argv[1] + "/saved")
saved = inner.first.weight.detach().cpu()
epoch()
accelerator.load_state(sys.argv[1] + "/saved")
restored = inner.first.weight
print("restored", torch.equal(restored.detach().cpu(), saved), restored.device)
print("trained", not torch.equal(start, saved))
accelerator.save_model(model, sys.argv[1] + "/model")
accelerator.save(inner.state_dict(), sys.argv[1] + "/weights.pt")
kept = torch.load(sys.argv[1] + "/weights.pt", weights_only=True)
print("kept", kept["first.weight"].device)
for length in range(1, 13):
    loss = model(torch.randn(length, 4, device=accelerator.device)).sum()
    accelerator.backward(loss)
    optimizer.step()
"""


def run(script, *args):
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    return done


def test_all_of_a_loop(tmp_path):
    told = run(SCRIPT, str(tmp_path))
    assert told.stdout.splitlines() == [
        "True xla:0 XLA",
        "True 1 xla",
        "seeded True",
        "tied True xla:0",
        "gathered 5",
        "restored True xla:0",
        "trained True",
        "kept cpu",
    ]
    assert "batches: 100%" in told.stderr
    assert told.stderr.count("XLA compiled anew in each of the last 8 steps") == 1


CHECK = ("test", "--engine", "xla")
REFUSED = """
from notebook_accel import Accelerator, ConfigError, FullyShardedDataParallelPlugin
for asked in ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, {"mixed_precision": "fp16"}):
    try:
        Accelerator(**asked)
    except ConfigError as error:
        print(error)
"""


def test_ranks_of_torchrun_are_refused(monkeypatch):
    """To torch_xla each would be alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AssertionError, match="WORLD_SIZE=2, and xla connects 1"):
        run("from notebook_accel import Accelerator; Accelerator()")


def test_the_check_of_the_command_line():
    told = run("import sys; from notebook_accel.cli import main; main(sys.argv[1:])", *CHECK)
    assert "all checks passed" in told.stdout


def test_what_torch_xla_does_not_do_says_what_there_is():
    sharding, precision = run(REFUSED).stdout.splitlines()
    assert "sharding is there by SPMD alone, which excludes xmp.spawn" in sharding
    assert 'use "bf16"' in precision


def test_importing_the_package_imports_no_torch_xla():
    told = run("import sys, notebook_accel.notebook.launcher; print('torch_xla' in sys.modules)")
    assert told.stdout.strip() == "False"
