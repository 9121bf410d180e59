"""The files of a checkpoint: all read alike, and what is wrong is not put down to the wrong one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, ConfigError, NotebookAccelError
from notebook_accel.training.files import state_files
from tests.training.single import fresh_rank  # noqa: F401


class Keeps(nn.Linear):
    """A module that keeps something beside its tensors."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.kept: Any = 1

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Trusted:
    """What a pickle may name for none but those who trust it."""


@dataclass
class Plain:
    size: int


@dataclass
class Doing:
    """Its constructor is its own, and does what it likes with what it is given."""

    name: str

    def __init__(self, name: str) -> None:
        self.name = name


def setup() -> tuple[Any, Any]:
    """A training that has made a step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = Keeps()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader: Any = DataLoader(range(4))  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator, model


def test_every_file_is_read_where_it_is_trusted(tmp_path: Path) -> None:
    accelerator, model = setup()
    accelerator.save_state(tmp_path)
    model.kept = Trusted()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: the state of the model holds"):
        accelerator.save_state(tmp_path)
    for name in ("pytorch_model.bin", "loader.bin", "random_states_0.pkl"):
        path = tmp_path / name
        states = torch.load(path, weights_only=False)
        torch.save({**states, "_extra_state": Trusted()}, path)
        with pytest.raises(NotebookAccelError, match=rf'{name} names .*"weights_only": False'):
            accelerator.load_state(tmp_path)
        accelerator.load_state(tmp_path, load_kwargs={"weights_only": False})
        torch.save(states, path)
    accelerator.load_state(tmp_path, load_kwargs={"map_location": torch.device("cpu")})
    assert model.kept == 1


def test_a_file_calls_no_constructor_of_a_users_class(tmp_path: Path) -> None:
    state_files.write_state(Plain(2), tmp_path / "plain", "it")
    assert state_files.read_state(tmp_path / "plain") == Plain(2)
    with pytest.raises(ConfigError, match="Doing"):
        state_files.write_state(Doing("a"), tmp_path / "doing", "it")
    with pytest.raises(NotebookAccelError, match=r"names .*Doing"):
        state_files.read_state(tmp_path / "doing")


def test_wrong_options_are_no_damage(tmp_path: Path) -> None:
    accelerator, _ = setup()
    accelerator.save_state(tmp_path)
    told = r"optimizer\.bin is whole, and cannot be read with .*"
    with pytest.raises(ConfigError, match=told + "cuda:99"):
        accelerator.load_state(tmp_path, load_kwargs={"map_location": "cuda:99"})
    with pytest.raises(ConfigError, match=r"is whole, and cannot be read with .*misspelt"):
        accelerator.load_state(tmp_path, load_kwargs={"misspelt": True})
    (tmp_path / "optimizer.bin").write_bytes(b"noise")
    with pytest.raises(NotebookAccelError, match=r"optimizer\.bin could not be read"):
        accelerator.load_state(tmp_path, load_kwargs={"map_location": "cuda:99"})


@pytest.mark.parametrize("kind", [PermissionError, MemoryError])
def test_no_older_one_is_taken_where_nothing_is_wrong_with_the_newest(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, _ = setup()
    for number in range(2):
        accelerator.save_state(tmp_path / f"checkpoint_{number}")
    plain = torch.load

    def read(path: Path, **options: Any) -> Any:
        if "checkpoint_1" in path.parts and path.name == "optimizer.bin":
            raise kind(f"not {path}")
        return plain(path, **options)

    monkeypatch.setattr(torch, "load", read)
    with pytest.raises(kind, match=r"checkpoint_1"):
        accelerator.resume_or_start(tmp_path)


def test_a_model_that_keeps_more_than_tensors_is_saved_whole(tmp_path: Path) -> None:
    accelerator, model = setup()
    accelerator.save_model(model, tmp_path / "one")
    accelerator.save_model(model, tmp_path / "two", max_shard_size=8)
    one = torch.load(tmp_path / "one" / "pytorch_model.bin")
    index = json.loads((tmp_path / "two" / "pytorch_model.bin.index.json").read_text())
    assert index["metadata"] == {"total_size": 12}
    files = {
        name: torch.load(tmp_path / "two" / file) for name, file in index["weight_map"].items()
    }
    for name, value in model.state_dict().items():
        assert repr(one[name]) == repr(files[name][name]) == repr(value)
