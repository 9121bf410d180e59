"""Where ranks cannot be launched, as on macOS: import, engine="inline" and Accelerator work."""

import pytest

from tests.interpreters import run_script

# Takes away what Linux alone has, before anything of ours is imported.
ELSEWHERE = """
import fcntl, mmap, os, select, signal, socket, sys

def remove(module, *names):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

# Libraries look at the platform when they are imported: they are those of Linux here.
import IPython, ipywidgets, msgspec, numpy, platformdirs, psutil, safetensors.torch, torch, yaml
import torch._dynamo, tqdm.auto

remove(os, *(name for name in dir(os) if name.startswith(("MFD_", "EFD_", "eventfd", "SCHED_"))))
remove(os, "memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity", "splice")
remove(fcntl, "F_ADD_SEALS", "F_GET_SEALS", *(n for n in dir(fcntl) if n.startswith("F_SEAL_")))
remove(signal, "SIGRTMIN", "SIGRTMAX", "pidfd_send_signal")
remove(socket, "MSG_CMSG_CLOEXEC", "SO_PEERCRED", "SO_PASSCRED")
remove(mmap, "MAP_NORESERVE", "MAP_POPULATE")
remove(select, "epoll")
sys.platform = "darwin"

from torch import nn
from notebook_accel import Accelerator, LaunchError, WorkerError, notebook_launcher, runs

def train():
    accelerator = Accelerator(cpu=True)
    data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)
    model = nn.Linear(2, 1)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters()), data)
    for batch in data:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.gather(torch.ones(1)).item()

assert train() == 1.0
run = notebook_launcher(train, engine="inline", view="text")
assert run.results == [1.0] and run.status == "succeeded", run.state
assert runs(everywhere=True)[-1].id == run.id
try:
    notebook_launcher(lambda: 1 / 0, engine="inline", view="none")
except WorkerError as error:
    assert "ZeroDivisionError" in str(error)
try:
    notebook_launcher(train, num_processes=2, view="none")
except LaunchError as error:
    assert "engine='inline'" in str(error), error
print("all of it works")
"""


@pytest.mark.long
def test_a_system_without_memfd_pidfd_and_seals():
    assert run_script(ELSEWHERE).endswith("all of it works\n")
