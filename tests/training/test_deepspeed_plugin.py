"""What a user may ask DeepSpeed for, and what is refused; nothing here needs the library."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.utils import DeepSpeedPlugin as PeerPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig as PeerConfig
from notebook_accel.utils import HfDeepSpeedConfig
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, ConfigError, DeepSpeedPlugin
from notebook_accel.errors import NotebookAccelError
from notebook_accel.training.files import zero as zero_files
from notebook_accel.training.preparing.prepare import _batch_sizes
from notebook_accel.training.settings import deepspeed_plugin
from notebook_accel.training.settings.handlers import GradientAccumulationPlugin
from notebook_accel.training.stepping.accumulation import Accumulation, resolve_plugin
from notebook_accel.training.strategies import deepspeed
from notebook_accel.training.strategies.deepspeed import DeepSpeedZero
from notebook_accel.training.strategies.request import ModelToPrepare
from notebook_accel.training.strategies.zero_config import Facts, complete
from notebook_accel.training.strategies.zero_engine import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
)
from tests.training.loading import Stream, numbers, prepare
from tests.training.single import Told, be, fresh_rank  # noqa: F401

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
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
    monkeypatch.setattr(deepspeed_plugin, "is_installed", lambda _: False)
    with pytest.raises(ConfigError, match="not installed: pip install deepspeed"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())


def test_where_deepspeed_does_not_train_in_fp16_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimpleNamespace(is_fp16_supported=lambda: None)
    library = SimpleNamespace(accelerator=SimpleNamespace(get_accelerator=lambda: device))
    monkeypatch.setattr(deepspeed_plugin, "is_installed", lambda _: True)
    monkeypatch.setattr(deepspeed, "_load_library", lambda *_: library)
    asked: Any = {"cpu": True, "deepspeed_plugin": DeepSpeedPlugin()}
    with pytest.raises(ConfigError, match=r"fp16 on the cpu of this machine; use .*bf16"):
        Accelerator(**asked, mixed_precision="fp16")
    assert Accelerator(**asked, mixed_precision="bf16").deepspeed_engine_wrapped is None
    device.is_fp16_supported = lambda: True
    asked["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=0)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="zero_stage=0: DeepSpeed divides gradients by a loss"):
        Accelerator(**asked, mixed_precision="fp16").prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )


class Engine(torch.nn.Module):
    """As DeepSpeed's around a model."""

    def __init__(self, model: torch.nn.Module, basic_optimizer: Any) -> None:
        super().__init__()
        self.module, self.basic_optimizer, self.ended = model, basic_optimizer, 0

    def destroy(self) -> None:
        self.ended += 1


def test_another_model_may_be_prepared_once_the_first_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimpleNamespace(is_fp16_supported=lambda: True)
    library = SimpleNamespace(
        accelerator=SimpleNamespace(get_accelerator=lambda: device),
        initialize=lambda model, optimizer, **_: (Engine(model, optimizer),),
    )
    monkeypatch.setattr(deepspeed_plugin, "is_installed", lambda _: True)
    monkeypatch.setattr(deepspeed, "_load_library", lambda *_: library)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    engines = []
    for _ in range(2):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engines.append(accelerator.prepare(model, optimizer)[0])
        assert accelerator.deepspeed_engine_wrapped.engine is engines[-1]
        accelerator.free_memory()
        assert accelerator.deepspeed_engine_wrapped is None
    assert [engine.ended for engine in engines] == [1, 1]
    accelerator.free_memory()


def test_what_is_said_of_a_checkpoint_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, dict[str, Any]]] = []

    def save(folder: str, **options: Any) -> None:
        told.append(("save", options))
        Path(folder, options["tag"]).mkdir()

    library = SimpleNamespace(
        save_checkpoint=save,
        load_checkpoint=lambda folder, **options: told.append(("load", options)),
    )
    accelerator: Any = Accelerator(cpu=True)
    strategy = accelerator._strategy
    strategy.engine = DeepSpeedEngineWrapper(library)
    for name in ("own_piece", "read_own"):
        method = getattr(DeepSpeedZero, name).__get__(strategy)
        monkeypatch.setattr(strategy, name, method)
    accelerator.save_state(tmp_path / "a", exclude_frozen_parameters=True)
    accelerator.load_state(tmp_path / "a", strict=False, load_optimizer_states=False)
    accelerator.load_state(tmp_path / "a", load_module_strict=False)
    assert told == [
        ("save", {"tag": zero_files.FOLDER, "exclude_frozen_parameters": True}),
        (
            "load",
            {
                "tag": zero_files.FOLDER,
                "load_module_strict": False,
                "load_optimizer_states": False,
            },
        ),
        ("load", {"tag": zero_files.FOLDER, "load_module_strict": False}),
    ]


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


@pytest.fixture
def zero(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The strategy without its library, and without weights that the library steps."""
    library = SimpleNamespace(safe_set_full_fp32_param=None)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(utils=library))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", library)
    strategy: Any = object.__new__(DeepSpeedZero)
    strategy.topology = SimpleNamespace(device=torch.device("cpu"), local_process_index=0)
    strategy._dtypes = {}
    return strategy


def test_what_a_module_keeps_beside_its_tensors_is_saved_and_loaded(zero: Any) -> None:
    model, other = torch.nn.Sequential(Counting(3)), torch.nn.Sequential(Counting(0))
    zero.load_state_dict(other, zero.state_dict(model, full=True))
    assert (other[0].seen, other[0].mean.tolist()) == (3, [3.0, 3.0])


FITTING = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}


@pytest.mark.parametrize(
    ("entries", "sizes"),
    [
        ({}, (2, 1, 1)),
        ({"gradient_accumulation_steps": 4}, (8, 1, 4)),
        ({"gradient_accumulation_steps": 4, **FITTING}, (32, 4, 4)),
    ],
)
def test_a_model_that_is_only_asked_has_sizes_that_fit(
    zero: Any, entries: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    """DeepSpeed takes none others, though it never steps such a model."""
    made: list[dict[str, Any]] = []
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto", **entries}
    zero.plugins = SimpleNamespace(active=DeepSpeedPlugin(hf_ds_config=config))
    zero.precision = SimpleNamespace(name="no", dtype=None)
    zero.topology.num_processes = 2
    zero._accumulation = Accumulation(GradientAccumulationPlugin())
    zero._initialize = lambda model, config: (made.append(dict(config)), model)
    zero.prepare_model(ModelToPrepare(torch.nn.Linear(1, 1), False, None))
    assert tuple(made[0][name] for name in SIZES) == sizes


def test_windows_that_were_set_on_the_way_are_those_of_the_configuration() -> None:
    config = {"gradient_accumulation_steps": 4, "train_batch_size": "auto", **ZERO}
    plugin, model = DeepSpeedPlugin(hf_ds_config=config), torch.nn.Linear(1, 1)
    device = torch.device("cpu")
    facts = Facts(model=model, device=device, num_ranks=2, num_steps=3, precision="no")
    assert tuple(complete(plugin, facts)[name] for name in SIZES) == (6, 1, 3)


def test_all_ranks_gather_weights_in_the_order_of_the_model(
    zero: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[int] = []

    def gather(weight: torch.Tensor, *, writes: bool) -> AbstractContextManager[None]:
        assert writes
        gathered.append(id(weight))
        return nullcontext()

    monkeypatch.setattr(deepspeed, "_gathered", gather)
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(10)))
    zero.load_state_dict(model, dict(reversed(model.state_dict().items())))
    assert gathered == [id(weight) for weight in model.parameters()]


def test_loaders_say_what_a_rank_takes_prepared_or_not() -> None:
    for raw in (numbers(12, 4), DataLoader(Stream(12), batch_size=4)):
        for split, taken in ((False, 4), (True, 2)):
            made = [
                prepare(raw, 1, 2, dispatch_batches=dispatched, split_batches=split)
                for dispatched in (False, True)
            ]
            num_shares = 4 // taken
            assert [_batch_sizes(one, num_shares) for one in (raw, *made)] == [[taken]] * 3


def test_steps_of_the_engine_are_counted_but_for_overflows() -> None:
    applied = iter([True, False])
    library = SimpleNamespace(
        step=lambda: None,
        was_step_applied=lambda: next(applied),
        set_gradient_accumulation_boundary=lambda _: None,
        backward=lambda *_, **__: None,
    )
    accumulation = Accumulation(GradientAccumulationPlugin())
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    engine = DeepSpeedEngineWrapper(library)
    optimizer = DeepSpeedOptimizerWrapper(inner, engine, accumulation=accumulation)
    loader = prepare(numbers(6))
    for _ in loader:
        engine.backward(torch.zeros(1))
        optimizer.step()
    assert optimizer.num_steps == 1
    assert optimizer.step_was_skipped
    assert accumulation.trained_on is loader


def test_a_load_drops_what_an_open_window_has_added_up() -> None:
    cleared: list[str] = []
    kept = SimpleNamespace(
        zero_grad=lambda: cleared.append("zero_grad"),
        averaged_gradients={0: [torch.ones(1)]},
        all_grad_tensors={0: [torch.ones(1)]},
        micro_step_id=0,
    )
    library = SimpleNamespace(optimizer=kept, zero_optimization_stage=lambda: 2)
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    accumulation = Accumulation(GradientAccumulationPlugin())
    optimizer = DeepSpeedOptimizerWrapper(
        inner, DeepSpeedEngineWrapper(library), accumulation=accumulation
    )
    optimizer.zero_grad()
    assert not cleared, "the window goes on"
    optimizer.drop_gradients()
    assert cleared == ["zero_grad"]
    assert kept.averaged_gradients == kept.all_grad_tensors == {0: None}
    assert kept.micro_step_id == -1


def test_a_folder_without_files_of_deepspeed_is_told(tmp_path: Path) -> None:
    (tmp_path / zero_files.FOLDER).mkdir()
    with pytest.raises(NotebookAccelError, match=r"pytorch_model has no files of DeepSpeed"):
        zero_files.read_weights(tmp_path)


def test_a_configuration_is_asked_filled_and_opened_again() -> None:
    given = {"optimizer": {"params": {"lr": "auto", "eps": "auto"}}, **ZERO}
    config = HfDeepSpeedConfig(given)
    assert config.is_zero2()
    assert not config.is_zero3()
    assert config.get_value("optimizer.params.lr") == "auto"
    assert config.fill({"optimizer.params.lr": 0.1})["optimizer"] == {"params": {"lr": 0.1}}
    config.reopen()
    assert config.config == given


def test_questions_are_answered_as_by_accelerate() -> None:
    given = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "fp16": {"enabled": False},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": 0,
    }
    ours, theirs = HfDeepSpeedConfig(given), PeerConfig(given)
    keys = ("zero_optimization.stage", "fp16.enabled", "bf16.enabled", "gradient_clipping")
    device = "zero_optimization.offload_param.device"
    for key in (*keys, device, "bf16", "nothing", "no.such.section"):
        for question in ("get_value", "find_config_node", "is_true", "is_false"):
            assert getattr(ours, question)(key) == getattr(theirs, question)(key), (question, key)
        assert ours.get_value(key, "else") == theirs.get_value(key, "else")
    for question in ("is_zero2", "is_zero3", "is_offload"):
        assert getattr(ours, question)() == getattr(theirs, question)()
    for config in (ours, theirs):
        config.del_config_sub_tree("zero_optimization.offload_param", must_exist=True)
        config.del_config_sub_tree("no.such.section")
        config.del_config_sub_tree("gradient_clipping")
        with pytest.raises(ValueError, match="nothing"):
            config.del_config_sub_tree("nothing", must_exist=True)
    assert ours.config == theirs.config
    assert not ours.is_offload()
    assert "offload_param" in given["zero_optimization"], "the user's own stays"


VALUES = {"train_batch_size": 8, "optimizer.params.lr": 0.1, "bf16.enabled": True}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda plugin: plugin.deepspeed_config_process(**VALUES), None),
        (lambda plugin: plugin.deepspeed_config_process(**VALUES, steps=2), "steps"),
        (lambda plugin: plugin.deepspeed_config_process(**VALUES, steps=2, must_match=False), None),
        (lambda plugin: plugin.deepspeed_config_process(train_batch_size=8), "optimizer.params.lr"),
        (lambda plugin: plugin.fill_match("optimizer.params.lr", **VALUES), None),
        (lambda plugin: plugin.fill_match("no.such.entry", **VALUES), None),
        (lambda plugin: plugin.fill_match("train_batch_size"), "train_batch_size"),
        (lambda plugin: plugin.set_mixed_precision("bf16"), None),
        (lambda plugin: plugin.set_mixed_precision("fp8"), None),
        (lambda plugin: plugin.set_mixed_precision("no"), None),
        (lambda plugin: plugin.select(), "by calling|: call "),
    ],
)
def test_code_completes_a_configuration_as_in_accelerate(call: Any, error: str | None) -> None:
    given = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 1,
        "steps": 3,
        "optimizer": {"params": {"lr": "auto"}},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False},
        **ZERO,
    }
    plugins: Any = [kind(hf_ds_config=given) for kind in (DeepSpeedPlugin, PeerPlugin)]
    for plugin in plugins:
        with nullcontext() if error is None else pytest.raises(ValueError, match=error):
            call(plugin)
    ours, theirs = (plugin.deepspeed_config for plugin in plugins)
    assert ours == theirs


def test_a_precision_is_not_set_beside_that_of_the_configuration() -> None:
    for kind in (DeepSpeedPlugin, PeerPlugin):
        plugin = kind(hf_ds_config={"fp16": {"enabled": True}, **ZERO})
        with pytest.raises(ValueError, match=r"bf16.*fp16"):
            plugin.set_mixed_precision("bf16")


def test_transformers_is_told_whether_to_divide_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    integration = SimpleNamespace(
        HfDeepSpeedConfig=lambda config: told.append(config["zero_optimization"]["stage"]),
        unset_hf_deepspeed_config=lambda: told.append(None),
    )
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers.integrations.deepspeed", integration)
    plugin = DeepSpeedPlugin(zero_stage=3)
    assert plugin.is_zero3_init_enabled()
    with plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled()
        assert told == [None]
        with plugin.zero3_init_context_manager(enable=True):
            assert told == [None, None, 3]
        assert told == [None, None, 3, None]
    assert plugin.is_zero3_init_enabled()
    assert told[4:] == [None, 3]


def test_transformers_is_not_told_without_what_it_reads_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    monkeypatch.setattr(deepspeed_plugin.importlib.util, "find_spec", lambda _: None)
    DeepSpeedPlugin(zero_stage=3).set_deepspeed_weakref()
    told = Told()
    be(told, monkeypatch)
    DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True).set_deepspeed_weakref()
    assert [line.rpartition(". ")[2] for line in told.notices] == ["pip install accelerate"]


def test_layers_of_experts_are_named_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[Any] = []
    library = SimpleNamespace(set_z3_leaf_modules=lambda model, kinds: named.append((model, kinds)))
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(utils=library))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", library)
    model = torch.nn.Sequential(Counting(1), torch.nn.Linear(1, 1))
    DeepSpeedPlugin(zero_stage=3).set_moe_leaf_modules(model)
    assert named == []
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "Counting, Linear")
    DeepSpeedPlugin(zero_stage=3).set_moe_leaf_modules(model)
    assert named == [(model, [Counting, torch.nn.Linear])]
    plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Expert")
    with pytest.raises(ConfigError, match="has Expert, and Sequential has layers of Counting, Li"):
        plugin.set_moe_leaf_modules(model)
