"""The simulated accelerator loses its contexts in forks, as others do; tests rely on that."""

from tests.interpreters import run_script

_FORKS = """
import os, torch
torch.ones(1, device="sim")
if not os.fork():
    try:
        torch.ones(1, device="sim")
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""


def test_use_in_a_forked_child_raises():
    assert "Cannot re-initialize SIM in forked subprocess" in run_script(_FORKS)
