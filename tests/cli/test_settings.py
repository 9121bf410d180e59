"""``notebook-accel config``."""

import builtins

import pytest

from notebook_accel.cli import main
from notebook_accel.config import LaunchConfig


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The default config file, which is not there yet."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    return tmp_path / "notebook-accel" / "config.yaml"


def answer(monkeypatch, *answers):
    """Answer the questions, and the rest by Enter; gives the questions that were asked."""
    left = iter(answers)
    asked = []

    def read(question):
        asked.append(question)
        return next(left, "")

    monkeypatch.setattr(builtins, "input", read)
    return asked


def test_default_asks_nothing_and_keeps_a_file(file, capsys):
    assert main(["config", "default", "--mixed_precision", "BF16"]) == 0
    assert LaunchConfig.load(file) == LaunchConfig(mixed_precision="bf16")
    assert main(["config", "default"]) == 0
    assert "stays as it is" in capsys.readouterr().out
    assert LaunchConfig.load(file).mixed_precision == "bf16"


def test_questions_are_the_rows_and_answers_are_checked(file, monkeypatch, capsys):
    answers = ("two", "2", "cpu", "bf16", "", "4", "", "magic", "fsdp", "2", "SHARD_GRAD_OP")
    asked = answer(monkeypatch, *answers)
    assert main(["config"]) == 0
    assert "expected a whole number" in capsys.readouterr().out
    config = LaunchConfig.load(file)
    assert config == LaunchConfig(
        num_processes=2,
        devices="cpu",
        mixed_precision="bf16",
        gradient_accumulation_steps=4,
        fsdp={"fsdp_version": 2, "sharding_strategy": "SHARD_GRAD_OP"},
    )
    assert asked[0].startswith("Processes: Number of ranks")
    assert asked[0].endswith("[one for each accelerator, else 1] ")
    # What was saved is what Enter means.
    asked = answer(monkeypatch)
    assert main(["config"]) == 0
    assert LaunchConfig.load(file) == config
    assert asked[0].endswith("[2] ")


def test_a_file_of_accelerate_is_converted(file, tmp_path, capsys):
    theirs = tmp_path / "huggingface" / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\n"
        "use_cpu: true\ndowncast_bf16: true\nmain_process_port: 0\n"
        "fsdp_config: {fsdp_version: 2}\n"
    )
    assert main(["config", "convert", "--config_file", str(tmp_path / "mine.yaml")]) == 0
    assert "downcast_bf16: not used here" in capsys.readouterr().out
    config = LaunchConfig.load(tmp_path / "mine.yaml")
    assert config == LaunchConfig(num_processes=2, devices="cpu", fsdp={"fsdp_version": 2})
    assert not file.exists()
    assert main(["config", "convert", str(tmp_path / "no.yaml")]) == 2


def test_nobody_answers(file, monkeypatch):
    def read(_):
        raise EOFError

    monkeypatch.setattr(builtins, "input", read)
    assert main(["config"]) == 2
    assert not file.exists()
