"""Rank 0 alone saves in a script of which only the import is changed: resumed, its losses equal."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from notebook_accel import notebook_launcher

SCRIPTS = Path(__file__).parent / "diffusion"
STEPS = 8


def changed(name: str, folder: Path) -> Path:
    """The script as a file of ours: its imports say notebook_accel."""
    text = (SCRIPTS / f"{name}.py").read_text()
    text = text.replace("import accelerate", "import notebook_accel as accelerate")
    path = folder / f"{name}.py"
    path.write_text(text.replace("from accelerate", "from notebook_accel"))
    return path


def call(path: Path, *argv: str) -> None:
    """Call the script's main, which a notebook would have imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(argv))


def by_launcher(path: Path, *argv: str) -> None:
    notebook_launcher(call, (path, *argv), num_processes=2, view="none", timeout=100)


def by_command_line(path: Path, *argv: str) -> None:
    command = [sys.executable, "-m", "notebook_accel", "launch", "--num_processes", "2", "--cpu"]
    subprocess.run([*command, str(path), *argv], check=True, timeout=100)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(300)
def test_rank_0_alone_saves_and_all_resume(tmp_path: Path) -> None:
    path = changed("text_to_image", tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    by_launcher(path, "--output_dir", str(whole), "--max_train_steps", str(STEPS))
    by_launcher(path, "--output_dir", str(parts), "--max_train_steps", "5")
    first = results(parts)
    newest = ("--resume_from_checkpoint", "latest")
    by_command_line(path, "--output_dir", str(parts), "--max_train_steps", str(STEPS), *newest)
    for rank, (expected, rest) in enumerate(zip(results(whole), results(parts), strict=True)):
        assert list(rest["losses"]) == ["5", "6", "7", "8"], "it went on after step 4"
        assert expected == {**rest, "losses": {**first[rank]["losses"], **rest["losses"]}}
    found = sorted(name for name in os.listdir(parts) if name.startswith(("checkpoint", ".")))
    assert found == ["checkpoint-8"]
