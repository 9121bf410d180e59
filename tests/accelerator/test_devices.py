"""Which devices ranks use, and how long they wait for each other on them."""

import os
import time
from datetime import timedelta

import pytest
import torch

from notebook_accel import (
    Accelerator,
    ConfigError,
    FullyShardedDataParallelPlugin,
    notebook_launcher,
)
from notebook_accel.launch import rank_environment


def _save_in_background(folder):
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT"
        )
    )
    model = accelerator.prepare(torch.nn.Linear(8, 8))
    accelerator.save_state(folder, async_save=True)
    accelerator.end_training()
    del model
    return os.getpid()


def test_a_sharded_checkpoint_written_in_the_background_uses_the_ranks_own_device(
    tmp_path, monkeypatch
):
    log = tmp_path / "contexts"
    monkeypatch.setenv("SIM_CONTEXT_LOG", str(log))
    folder = str(tmp_path / "state")
    run = notebook_launcher(_save_in_background, (folder,), num_processes=2, view="none")
    used = {tuple(line.split()[:2]) for line in log.read_text().splitlines()}
    assert used == {(f"pid={pid}", f"device={rank}") for rank, pid in enumerate(run)}


def _meet_late():
    from notebook_accel.training.processes import process_group

    process_group._STORE_TIMEOUT = timedelta(seconds=2)
    accelerator = Accelerator()
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(5)
    return float(accelerator.reduce(torch.ones(1, device=accelerator.device)))


def test_the_first_collective_waits_longer_than_the_connection_may_take():
    assert notebook_launcher(_meet_late, num_processes=2, view="none").results == [2, 2]


def _visible():
    return os.environ.get("SIM_VISIBLE_DEVICES"), str(Accelerator().device)


def test_devices_of_a_kind_that_does_not_read_the_variable_of_cuda(monkeypatch):
    monkeypatch.setenv("SIM_DEVICES", "4")
    # A variable with VISIBLE in its name: each count is a question of its own.
    monkeypatch.setenv("SIM_READS_CUDA_VISIBLE", "0")
    with pytest.raises(ConfigError, match=r"type 'sim' do not read CUDA_VISIBLE_DEVICES"):
        notebook_launcher(_visible, devices=[3, 1], view="none")
    monkeypatch.setitem(rank_environment.VISIBLE_OF_KIND, "sim", "SIM_VISIBLE_DEVICES")
    run = notebook_launcher(_visible, devices=[3, 1], view="none")
    assert run.results == [("3,1", "sim:0"), ("3,1", "sim:1")]
    with pytest.raises(ConfigError, match=r"devices=\[1, 4\], but of these the machine has 1"):
        notebook_launcher(_visible, devices=[1, 4], view="none")
    # As a scheduler sets it.
    monkeypatch.setenv("SIM_VISIBLE_DEVICES", "2,3")
    assert notebook_launcher(_visible, devices=[1], view="none").results == [("3", "sim:0")]
