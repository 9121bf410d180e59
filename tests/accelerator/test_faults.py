"""Errors after which a device refuses all further work of a process."""

import pytest
import torch

from notebook_accel import Accelerator, WorkerError, notebook_launcher
from tests.accelerator.ranks import RANKS
from tests.kernel.notebooks import open_notebook


def _fail():
    table = torch.ones(4, device=Accelerator().device)
    wrong = table[torch.tensor([9], device=table.device)]
    float(wrong + 1)


def test_the_error_says_that_its_line_may_not_be_at_fault():
    with pytest.raises(WorkerError, match="device-side assert") as caught:
        notebook_launcher(_fail, num_processes=RANKS, view="none")
    text = str(caught.value)
    assert "the line shown may not be the one at fault" in text
    assert 'env={"CUDA_LAUNCH_BLOCKING": "1"}' in text


def test_a_session_gets_new_ranks_and_says_what_is_lost():
    with open_notebook() as book:
        book.run("%load_ext notebook_accel\nimport os, torch\nours = 5")
        pids = book.run("%%accelerate -n 2\nx, y = 1, ours\nos.getpid()")
        text = book.fails("""
            %%accelerate
            accelerator.wait_for_everyone()
            if rank == 1:
                table = torch.ones(4, device=device)
                float(table[torch.tensor([9], device=device)])
            float(accelerator.reduce(torch.ones(1, device=device)))
        """)
        assert "the line shown may not be the one at fault" in text
        assert "The next cell gets new ranks" in text
        reply = book.finish(
            book.start(
                "%%accelerate\nok = accelerator.reduce(torch.ones(1, device=device))\n"
                "int(ok), 'x' in globals()"
            )
        )
        assert reply.status == "ok", reply.traceback
        shown = "\n".join(str(output["data"]) for output in reply.outputs)
        assert "the device of rank 1 failed for good" in shown
        assert "the session had is gone: `x`, `y`" in shown
        assert "ranks 0-1: (2, False)" in reply.text
        assert book.run("%%accelerate\nos.getpid(), ours") != pids


def test_cells_that_fail_do_not_pile_up_memory_of_the_device():
    with open_notebook() as book:
        book.run("%load_ext notebook_accel\nimport torch")
        for _ in range(4):
            book.fails(
                "%%accelerate -n 1\ndef fill():\n    big = torch.ones(1 << 24, device=device)\n"
                "    raise ValueError\nfill()"
            )
        held = book.run("%%accelerate\ntorch.accelerator.memory_allocated() >> 20")
        assert held == "rank 0: 0\n", "MB; a failure holds 64 until the next cell"
