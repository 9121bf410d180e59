"""The commands about this machine, about weights, and the sanity training."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from notebook_accel.cli import main, sanity
from notebook_accel.errors import ConfigError
from notebook_accel.launch.slurm import slurm_step
from tests.cli.commands import ROOT, notebook_accel
from tests.launches import without_gloo

pytestmark = pytest.mark.timeout(300)

CHECKS = ("ranks", "collectives", "data", "training", "checkpoint")


def test_the_sanity_training_has_a_verdict_a_check(tmp_path):
    options = ("--num_processes=2", "--use_fsdp", "--fsdp_version=2")
    done = notebook_accel("test", *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = without_gloo(done.stdout).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"[rank 0] ✓ {name}" for name in CHECKS]
    assert last == "notebook-accel test: all checks passed"


def test_a_check_that_fails_fails_the_test(monkeypatch, capsys):
    monkeypatch.setattr(sanity, "_CHECKS", {"data": lambda _: (False, "none came")})
    assert not sanity.check_training()
    assert capsys.readouterr().out == "✗ data: none came (wrong on the ranks 0)\n"


def test_env_and_doctor(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "notebook-accel" / "config.yaml"
    file.parent.mkdir()
    file.write_text("num_processes: 2\nenv:\n  TOKEN: secret\nseed: 3\n")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "secret")
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}" in said
    assert "num_processes: 2" in said
    assert "seed: 3" in said
    assert "ACCELERATE_LOG_LEVEL" in said
    assert "secret" not in said
    assert main(["doctor"]) == 0
    assert "✓ system: " in capsys.readouterr().out
    file.write_text("num_processes: -2\n")
    assert main(["doctor"]) == 1
    assert "✗ settings" in capsys.readouterr().out


def test_weights_are_merged(tmp_path, capsys):
    from torch.distributed import checkpoint

    weights = {"weight": torch.arange(6.0), "bias": torch.ones(2)}
    folder = tmp_path / "pytorch_model_fsdp_0"
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.save({"model": weights}, checkpoint_id=str(folder), no_dist=True)
    assert main(["merge-weights", str(folder), str(tmp_path / "out")]) == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: weight.tolist() for name, weight in merged.items()} == {
        name: weight.tolist() for name, weight in weights.items()
    }
    assert main(["merge-weights", str(tmp_path / "no"), str(tmp_path / "out")]) == 2
    assert "notebook-accel merge-weights: " in capsys.readouterr().err


@pytest.mark.long
def test_estimates_are_accelerates(tmp_path, monkeypatch, capsys):
    done = notebook_accel("estimate-memory", "--help", folder=tmp_path)
    assert "--library_name" in done.stdout
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["estimate-memory", "bert-base-cased"]) == 2
    assert "pip install 'notebook-accel[accelerate]'" in capsys.readouterr().err


def test_join_needs_a_token_and_asks_for_it_at_a_terminal(capsys, monkeypatch):
    assert main(["join", "10.0.0.1:3000"]) == 2
    assert "a token is needed" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("notebook_accel.cli.machine.getpass", lambda _: "short")
    assert main(["join", "10.0.0.1:3000"]) == 2
    said = capsys.readouterr().err
    assert "the join token has 5 characters" in said
    assert "short" not in said


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[03-05,9],gpu1", "node03"),
        ("a-1,b-2", "a-1"),
        ("rack[1-2]n[07,9]", "rack1n07"),
        ("localhost", "localhost"),
    ],
)
def test_a_step_of_slurm(nodes, first):
    step = {
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NODEID": "2",
        "SLURM_JOB_ID": "123456",
    }
    found = slurm_step(step)
    assert (found.num_nodes, found.node_rank, found.master_addr) == (3, 2, first)
    assert slurm_step({**step, "SLURM_NODEID": "0"}).port == found.port
    assert slurm_step({"SLURM_JOB_ID": "1", "SLURM_NNODES": "3"}) is None
    with pytest.raises(ConfigError, match="--ntasks-per-node=1"):
        slurm_step({**step, "SLURM_STEP_NUM_TASKS": "6"})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("config <&-", "there is nobody to answer"),
        ("config default", "notebook-accel config: "),
        ("estimate-memory ../../x", "is no model of the Hugging Face Hub"),
        ("doctor", "versions"),
        ("--help | true", ""),
        ("runs | true", ""),
        ("join $(printf 'a%.0s' $(seq 100000)):80", "expected HOST:PORT"),
    ],
)
def test_no_command_ends_with_a_traceback(line, said, tmp_path):
    (tmp_path / "file").touch()
    odd = {
        "HOME": str(tmp_path / "file"),
        "XDG_CONFIG_HOME": str(tmp_path / "file" / "none"),
        "PYTHONIOENCODING": "ascii",
        "PYTHONPATH": str(ROOT),
        "NOTEBOOK_ACCEL_JOIN_TOKEN": "0" * 64,
        "NOTEBOOK_ACCEL_RUNS": str(tmp_path / "runs"),
    }
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m notebook_accel {line}"],
        env={**os.environ, **odd},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert "Traceback" not in done.stderr + done.stdout
    assert "Exception ignored" not in done.stderr
    assert said in done.stderr + done.stdout
