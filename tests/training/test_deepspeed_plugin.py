"""What a user may ask DeepSpeed for, and what is refused; nothing here needs the library."""

import json
import sys
from types import SimpleNamespace

import pytest
from notebook_accel.utils import HfDeepSpeedConfig
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, ConfigError, DeepSpeedPlugin
from notebook_accel.training.preparing import _batch_sizes
from notebook_accel.training.stepping.accumulation import resolve_plugin
from notebook_accel.training.strategies import deepspeed_plugin
from tests.training.loading import Stream, numbers, prepare
from tests.training.single import Told, be

ZERO = {"zero_optimization": {"stage": 2}}


def test_without_a_configuration_the_fields_make_one():
    config = DeepSpeedPlugin(zero_stage=3, gradient_clipping=0.5).deepspeed_config
    assert config["zero_optimization"]["stage"] == 3
    assert config["gradient_clipping"] == 0.5
    assert config["train_batch_size"] == config["gradient_accumulation_steps"] == "auto"


def test_a_file_gives_the_fields_and_the_environment_fills_what_is_open(tmp_path, monkeypatch):
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
        ({"hf_ds_config": ZERO, "zero_stage": 3}, "zero_stage=3, and .*stage is 2"),
        ({"hf_ds_config": {"bf16": {}}}, "no section zero_optimization"),
        ({"hf_ds_config": "no/such.json"}, "'no/such.json': expected a dictionary, or the path"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, "zero_stage=2: expected zero_stage=3"),
        ({"zero_stage": 0}, "expected 1, 2 or 3. Stage 0 is what DDP does"),
        ({"enable_msamp": True}, "MS-AMP is not there"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        DeepSpeedPlugin(**fields)


def test_the_steps_of_the_environment_are_the_accelerators(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    plugin = DeepSpeedPlugin()
    assert plugin.resolve_steps(2) == 2
    assert resolve_plugin(plugin.resolve_steps(None), None).num_steps == 4


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(deepspeed_plugin, "is_installed", lambda _: False)
    with pytest.raises(ConfigError, match="not installed: pip install deepspeed"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())


def test_loaders_say_what_a_rank_takes_prepared_or_not():
    for raw in (numbers(12, 4), DataLoader(Stream(12), batch_size=4)):
        for split, taken in ((False, 4), (True, 2)):
            made = [
                prepare(raw, 1, 2, dispatch_batches=dispatched, split_batches=split)
                for dispatched in (False, True)
            ]
            num_shares = 4 // taken
            assert [_batch_sizes(one, num_shares) for one in (raw, *made)] == [[taken]] * 3


def test_a_configuration_is_asked_filled_and_opened_again():
    from accelerate.utils.deepspeed import HfDeepSpeedConfig as PeerConfig

    given = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "optimizer": {"params": {"lr": "auto", "eps": "auto"}},
        "gradient_clipping": 0,
    }
    ours, theirs = HfDeepSpeedConfig(given), PeerConfig(given)
    device = "zero_optimization.offload_param.device"
    for key in (device, "gradient_clipping", "optimizer.params", "nothing", "no.such.section"):
        for question in ("get_value", "find_config_node", "is_true"):
            assert getattr(ours, question)(key) == getattr(theirs, question)(key), (question, key)
        assert ours.get_value(key, "else") == theirs.get_value(key, "else")
    for question in ("is_zero2", "is_zero3", "is_offload"):
        assert getattr(ours, question)() == getattr(theirs, question)()
    assert ours.fill({"optimizer.params.lr": 0.1})["optimizer"] == {"params": {"lr": 0.1}}
    ours.reopen()
    assert ours.config == given


def test_a_precision_is_not_set_beside_that_of_the_configuration():
    plugin = DeepSpeedPlugin(hf_ds_config=ZERO)
    plugin.set_mixed_precision("bf16")
    assert plugin.deepspeed_config["bf16"] == {"enabled": True}
    with pytest.raises(ConfigError, match=r"fp16.*bf16"):
        plugin.set_mixed_precision("fp16")


def test_transformers_is_not_told_without_what_it_reads_by(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    monkeypatch.setattr(deepspeed_plugin, "is_installed", lambda _: False)
    DeepSpeedPlugin(zero_stage=3).set_deepspeed_weakref()
    told = Told()
    be(told, monkeypatch)
    DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True).set_deepspeed_weakref()
    assert [line.rpartition(". ")[2] for line in told.notices] == [
        "pip install transformers accelerate"
    ]
