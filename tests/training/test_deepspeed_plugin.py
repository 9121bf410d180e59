"""What a user may ask DeepSpeed for, and what is refused; nothing here needs the library."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from notebook_accel.utils import HfDeepSpeedConfig

from notebook_accel import Accelerator, ConfigError, DeepSpeedPlugin
from notebook_accel.training import deepspeed_plugin
from notebook_accel.training.accumulation import resolve_plugin
from notebook_accel.training.strategies.deepspeed import DeepSpeedZero
from tests.training.single import fresh_rank  # noqa: F401

if TYPE_CHECKING:
    from pathlib import Path

ZERO: dict[str, Any] = {"zero_optimization": {"stage": 2}}


def test_without_a_configuration_the_fields_make_one() -> None:
    config = DeepSpeedPlugin(zero_stage=3, gradient_clipping=0.5).deepspeed_config
    assert config["zero_optimization"]["stage"] == 3
    assert config["gradient_clipping"] == 0.5
    assert config["train_batch_size"] == config["gradient_accumulation_steps"] == "auto"


def test_a_file_gives_the_fields_and_the_environment_fills_what_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.25")
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 1, "the file's"
    assert plugin.gradient_clipping == plugin.deepspeed_config["gradient_clipping"] == 0.25


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zero_stage": 4}, "zero_stage=4: expected 0, 1, 2 or 3"),
        ({"hf_ds_config": ZERO, "zero_stage": 3}, "zero_stage=3, and .*stage is 2"),
        ({"hf_ds_config": {"bf16": {}}}, "no section zero_optimization"),
        ({"hf_ds_config": "no/such.json"}, "'no/such.json': expected a dictionary, or the path"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, "zero_stage=2: expected zero_stage=3"),
        ({"offload_optimizer_device": "nvme"}, "set offload_optimizer_nvme_path"),
        ({"gradient_accumulation_steps": 0}, "steps=0: expected a whole number"),
        ({"enable_msamp": True}, "MS-AMP is not there"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeepSpeedPlugin(**fields)


def test_the_steps_of_the_environment_are_the_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    plugin = DeepSpeedPlugin()
    assert plugin.resolve_steps(2) == 2
    assert resolve_plugin(plugin.resolve_steps(None), None).num_steps == 4


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_plugin, "is_deepspeed_available", lambda: False)
    with pytest.raises(ConfigError, match="not installed: pip install deepspeed"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())


class Counting(torch.nn.Module):
    """Keeps what is no tensor, beside one that is."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen = seen
        self.register_buffer("mean", torch.full((2,), float(seen)))

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_what_a_module_keeps_beside_its_tensors_is_saved_and_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = SimpleNamespace(safe_set_full_fp32_param=None)  # for weights, which there are none of
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(utils=library))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", library)
    strategy: Any = object.__new__(DeepSpeedZero)
    strategy.topology = SimpleNamespace(device=torch.device("cpu"), local_process_index=0)
    strategy._dtypes = {}
    model, other = torch.nn.Sequential(Counting(3)), torch.nn.Sequential(Counting(0))
    strategy.load_state_dict(other, strategy.state_dict(model, full=True))
    assert (other[0].seen, other[0].mean.tolist()) == (3, [3.0, 3.0])


def test_a_configuration_is_asked_filled_and_opened_again() -> None:
    given = {"optimizer": {"params": {"lr": "auto", "eps": "auto"}}, **ZERO}
    config = HfDeepSpeedConfig(given)
    assert config.is_zero2()
    assert not config.is_zero3()
    assert config.get_value("optimizer.params.lr") == "auto"
    assert config.fill({"optimizer.params.lr": 0.1})["optimizer"] == {"params": {"lr": 0.1}}
    config.reopen()
    assert config.config == given
