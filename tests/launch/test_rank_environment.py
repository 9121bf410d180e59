"""The variables of ranks: whose word counts, and what a kernel keeps to itself."""

import os

import pytest

from notebook_accel import ConfigError
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.rank_environment import num_threads_of, rank_environment


def test_whose_word_counts(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("MASTER_PORT", "1")
    config = LaunchConfig(use_port=29_501, mixed_precision="bf16", env={"MINE": "1", "A": "2"})
    found = rank_environment(config)
    assert found["GLOO_SOCKET_IFNAME"] == "lo"
    assert found["NCCL_SOCKET_IFNAME"] == "eth0"
    assert found["MASTER_PORT"] == "29501"
    assert found["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert (found["MINE"], found["A"]) == ("1", "2")
    assert rank_environment(LaunchConfig(env={"MASTER_PORT": "5"}))["MASTER_PORT"] == "5"
    found = rank_environment(config, of_engine={"A": "engine", "NCCL_SOCKET_IFNAME": "engine"})
    assert (found["A"], found["NCCL_SOCKET_IFNAME"]) == ("2", "engine")


def test_what_a_kernel_keeps_to_itself(monkeypatch):
    gone = ("JPY_PARENT_PID", "PYDEVD_USE_FRAME_EVAL", "MPLBACKEND", "RANK", "ROLE_RANK")
    gone += ("TORCHELASTIC_RUN_ID",)
    kept = ("ROLE_ARN", "GROUP_ID", "IPYTHONDIR", "HOME_OF_RANK", "TORCHELASTIC_ENABLE_FILE_TIMER")
    for name in (*gone, *kept):
        monkeypatch.setenv(name, "somebody's")
    found = rank_environment(LaunchConfig())
    assert [name for name in gone if name in found] == []
    assert {found[name] for name in kept} == {"somebody's"}


@pytest.mark.parametrize(
    ("visible", "devices", "seen"),
    [(None, [2, 0], "2,0"), ("5,7,9", [2, 0], "9,5"), ("GPU-a,GPU-b", [1], "GPU-b")],
)
def test_devices_are_counted_among_those_that_the_notebook_sees(
    visible, devices, seen, monkeypatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert rank_environment(LaunchConfig(devices=devices))["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, None),
        ({"HIP_VISIBLE_DEVICES": "4,5"}, "5"),
        # HIP numbers those that it leaves.
        ({"ROCR_VISIBLE_DEVICES": "4,5"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "4,5"}, "1"),
    ],
)
def test_what_a_scheduler_has_set_for_amd_devices_counts_once(given, seen, monkeypatch):
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    assert rank_environment(LaunchConfig(devices=[1])).get("HIP_VISIBLE_DEVICES") == seen


@pytest.mark.parametrize(
    ("visible", "device", "said"),
    [
        *((text, 2, "0 to 1: choose among these") for text in ("5,7", "5,7,-1,9")),
        *((text, 0, f"'{text}' hides all.*devices='cpu'") for text in ("", "-1", " -1,0")),
    ],
)
def test_a_device_that_the_notebook_does_not_see(visible, device, said, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=rf"devices=\[{device}\].*{said}"):
        rank_environment(LaunchConfig(devices=[device]))


def test_threads_are_shared_among_the_ranks():
    cores = len(os.sched_getaffinity(0))
    assert num_threads_of({}, 1) == cores
    assert num_threads_of({}, 10 * cores) == 1
    assert num_threads_of({"OMP_NUM_THREADS": "3"}, 10) == 3
    assert num_threads_of({"OMP_NUM_THREADS": "3,2"}, 10) == 3, "the outermost of nested regions"
    for no_number in ("all", "²", ",2"):
        assert num_threads_of({"OMP_NUM_THREADS": no_number}, 1) == cores
