"""``DeepSpeedPlugin``, the settings with which a user asks for DeepSpeed.

Its fields and environment variables are those of Hugging Face Accelerate. A field left at None
takes its value from the DeepSpeed configuration, else from its environment variable, else from its
default. Making a plugin does not import DeepSpeed; the strategy (``deepspeed.py``) does.

The configuration is a nested dictionary, whose entries are named with dots:
``"zero_optimization.stage"`` is the entry ``stage`` in the section ``zero_optimization``.
``prepare`` replaces the value "auto" of an entry by one that follows from the prepared models,
optimizers and loaders. An "auto" entry for which nothing follows is removed, so that DeepSpeed's
own default holds.

If the configuration describes an optimizer or a scheduler, a training script makes a placeholder
(``DummyOptim``, ``DummyScheduler``) where it would make one of torch, and passes it to ``prepare``,
which returns the one that DeepSpeed made from its configuration.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from notebook_accel.config.plugins import DeepSpeedOptions
from notebook_accel.config.setting import documented, settings_of
from notebook_accel.errors import ConfigError
from notebook_accel.training.settings import environment
from notebook_accel.training.settings.environment import is_installed
from notebook_accel.training.settings.handlers import StrategyPlugin
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.strategies.base import PrepareCall, Request

AUTO = "auto"


def is_open(value: Any) -> bool:
    """Return whether the value of a configuration entry is still open: None or "auto"."""
    return value is None or value == AUTO


class HfDeepSpeedConfig:
    """A DeepSpeed configuration whose entries can be read, set and completed by dotted names.

    Attributes:
        config: the nested dictionary. A dictionary that was given is copied; if another
            ``HfDeepSpeedConfig`` was given, both objects share its dictionary.

    Raises:
        ConfigError: the argument is neither a dictionary, nor another ``HfDeepSpeedConfig``, nor
            the path of a JSON file with a dictionary.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        """Read the configuration.

        Args:
            config_file_or_dict: a dictionary, the path of a JSON file, or another
                ``HfDeepSpeedConfig``.
        """
        self.config: dict[str, Any] = _read(config_file_or_dict)
        # What ``fill`` put in the place of "auto".
        self._filled: dict[str, Any] = {}

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dictionary that holds an entry, and the entry's key in that dictionary.

        The dictionary is None if the configuration has no such section. The entry itself need not
        exist.
        """
        *sections, name = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if not isinstance(node, dict):
                return None, name
        return node, name

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of an entry, by its dotted name; ``default`` if it is missing."""
        node, name = self.find_config_node(ds_key_long)
        return default if node is None else node.get(name, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Set an entry, and create the sections of its dotted name that are missing."""
        *sections, name = ds_key_long.split(".")
        node = self.config
        for section in sections:
            if not isinstance(node.get(section), dict):
                node[section] = {}
            node = node[section]
        node[name] = value

    def del_config_sub_tree(self, ds_key_long: str) -> None:
        """Remove an entry or a whole section, by its dotted name; do nothing if it is missing."""
        node, name = self.find_config_node(ds_key_long)
        if node is not None:
            node.pop(name, None)

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether an entry exists and its value is truthy: not False, 0, None or ""."""
        return bool(self.get_value(ds_key_long))

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether an entry is "auto", so that ``prepare`` replaces or removes it."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def is_zero2(self) -> bool:
        """Return whether ZeRO stage 2 is set, which shards gradients and optimizer states."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Return whether ZeRO stage 3 is set, which also shards weights."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Return whether weights or optimizer states are kept in CPU memory or on a disk."""
        devices = (
            self.get_value(f"zero_optimization.offload_{what}.device")
            for what in ("optimizer", "param")
        )
        return any(device in ("cpu", "nvme") for device in devices)

    def reopen(self) -> None:
        """Set the entries that :meth:`fill` replaced or removed back to "auto", for the next model.

        Entries that were changed after ``fill`` keep their values.
        """
        for key, value in self._filled.items():
            if self.get_value(key) == value:
                self.set_value(key, AUTO)
        self._filled = {}

    def fill(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Give each "auto" entry its value in ``values``, in place; remove it if there is no value.

        Args:
            values: the values by dotted names. Names of entries that are not "auto" are ignored.

        Returns:
            a copy of the completed configuration; DeepSpeed may change this copy.
        """
        self._filled |= {key: values.get(key) for key in list(_entries(self.config, AUTO))}
        for key, value in self._filled.items():
            if self.get_value(key) != AUTO:
                continue
            if value is None:
                self.del_config_sub_tree(key)
            else:
                self.set_value(key, value)
        return copy.deepcopy(self.config)


def _entries(section: Mapping[str, Any], wanted: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of a section's entries, at any depth, whose value is ``wanted``."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _entries(value, wanted, f"{prefix}{name}.")
        elif value == wanted:
            yield prefix + name


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return copy.deepcopy(given)
    if isinstance(given, HfDeepSpeedConfig):
        return given.config
    if isinstance(given, (str, os.PathLike)) and Path(given).is_file():
        try:
            read = json.loads(Path(given).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"the DeepSpeed configuration {given} is no JSON: {error}") from None
        if isinstance(read, dict):
            return read
    shown = repr(given) if isinstance(given, (str, os.PathLike)) else f"a {type(given).__name__}"
    raise ConfigError(
        f"the DeepSpeed configuration is {shown}: expected a dictionary, or the path of a JSON "
        "file that there is"
    )


_OPTIONS = settings_of(DeepSpeedOptions)
# The options that are entries of DeepSpeed's configuration.
_ENTRIES = {name: one for name, one in _OPTIONS.items() if one.entry}


@documented
@dataclass
class DeepSpeedPlugin(StrategyPlugin, DeepSpeedOptions):
    """Settings of DeepSpeed's ZeRO: optimizer states, gradients and weights sharded over the ranks.

    DeepSpeed does mixed precision, loss scaling, gradient accumulation and clipping itself. Its
    configuration is a file or mapping (``hf_ds_config``) whose "auto" entries ``prepare``
    completes. Without ``hf_ds_config`` the configuration is made from the other fields.

    Attributes:
        deepspeed_config: the configuration, a dictionary that ``prepare`` completes in place.
        dschf: the configuration object that Transformers was given, so that ``from_pretrained``
            shards weights as it reads them; None if Transformers was given no configuration.

    Raises:
        ConfigError: a field has an unknown value, or contradicts ``hf_ds_config``.

    Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2020).

    Example:
        >>> from notebook_accel import DeepSpeedPlugin
        >>> plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0)
        >>> plugin.deepspeed_config["zero_optimization"]["stage"]
        2
    """

    switch = "USE_DEEPSPEED"
    composes = False
    divides_layers = True

    def __post_init__(self) -> None:
        if self.enable_msamp:
            raise ConfigError('enable_msamp=True: MS-AMP is not there; use mixed_precision="bf16"')
        self.dschf: Any = None
        given = self.hf_ds_config or _OPTIONS["hf_ds_config"].from_environment() or "none"
        if given == "none":
            # Without a configuration all is "auto", and the fields fill it in.
            sizes = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO}
            self.hf_ds_config = HfDeepSpeedConfig(sizes)
            for option in _ENTRIES.values():
                self.hf_ds_config.set_value(option.entry, AUTO)
        elif not isinstance(given, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(given)
        if not isinstance(self.hf_ds_config.config.get("zero_optimization"), dict):
            raise ConfigError(
                "the DeepSpeed configuration has no section zero_optimization: add one, such as "
                '"zero_optimization": {"stage": 2}'
            )
        self._join_with_fields()
        if self.zero_stage not in (1, 2, 3):
            raise ConfigError(
                f"zero_stage={self.zero_stage!r}: expected 1, 2 or 3. Stage 0 is what DDP "
                "does: leave DeepSpeed out"
            )
        if self.offload_param_device != "none" and self.zero_stage < 3:
            raise ConfigError(
                f"offload_param_device={self.offload_param_device!r} and zero_stage="
                f'{self.zero_stage}: expected zero_stage=3, or offload_param_device="none"'
            )
        self.deepspeed_config = self.hf_ds_config.config
        # Steps are reported by this package's own views.
        self.deepspeed_config["steps_per_print"] = float("inf")
        if self.zero3_init_flag is None:
            self.zero3_init_flag = _OPTIONS["zero3_init_flag"].from_environment()
        self._wants_init = bool(self.zero3_init_flag)
        self.zero3_init_flag = self.hf_ds_config.is_zero3() and self.zero3_init_flag is not False
        if self.transformer_moe_cls_names is None:
            names = _OPTIONS["transformer_moe_cls_names"].from_environment()
            self.transformer_moe_cls_names = names

    @classmethod
    def resolve(cls, argument: str, given: Any) -> DeepSpeedPlugin | None:
        """Return the plugin that ``Accelerator`` was given or the environment asks for, else None.

        Entries that an earlier ``prepare`` filled in are set back to "auto". Transformers is told
        whether to shard weights as it reads them.

        Args:
            argument: name of the argument of ``Accelerator``, for error messages.
            given: value of that argument: a plugin, a dictionary with one plugin (by any name), or
                None.

        Raises:
            ConfigError: ``given`` is no plugin or has several, or DeepSpeed is not installed.
        """
        if isinstance(given, dict):
            # Accelerate takes several by name; DeepSpeed trains one model an Accelerator.
            if len(given) > 1:
                raise ConfigError(
                    f"Accelerator got {len(given)} DeepSpeedPlugins, and DeepSpeed trains one "
                    "model an Accelerator: make an Accelerator for each model, with its own "
                    "deepspeed_plugin"
                )
            given = next(iter(given.values()), None)
        plugin: Any = super().resolve(argument, given)
        if plugin is None:
            return None
        if not is_installed("deepspeed"):
            raise ConfigError(
                "DeepSpeed was asked for and is not installed: pip install deepspeed ninja"
            )
        plugin.hf_ds_config.reopen()
        plugin.set_deepspeed_weakref()
        return plugin  # type: ignore[no-any-return]

    def _join_with_fields(self) -> None:
        """Give each field of the plugin and its entry in the configuration the same value.

        A field without a value takes the entry's, and an entry without a value takes the field's.
        If neither has one, the environment variable decides, else the default.
        """
        differing = []
        for name, option in _ENTRIES.items():
            asked, there = getattr(self, name), self.get_value(option.entry)
            if not is_open(asked):
                if not is_open(there) and there != asked:
                    differing.append(f"{name}={asked!r}, and {option.entry} is {there!r}")
                self.hf_ds_config.set_value(option.entry, asked)
                continue
            value = there
            if is_open(value):
                variable = option.variable_set(os.environ)
                is_auto = variable is not None and os.environ[variable].strip() == AUTO
                # Its variable is the Accelerator's, whose argument goes before it.
                if is_auto or name == "gradient_accumulation_steps":
                    value = AUTO
                else:
                    value = option.from_environment()
                if there is not None:
                    self.hf_ds_config.set_value(option.entry, value)
            setattr(self, name, value)
        if differing:
            raise ConfigError(
                f"DeepSpeedPlugin and its configuration differ: {'; '.join(differing)}. Give one "
                'of them, or set the entry of the configuration to "auto"'
            )

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a configuration entry, by its dotted name; ``default`` if missing."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether an entry is "auto", so that ``prepare`` replaces or removes it."""
        return bool(self.hf_ds_config.is_auto(ds_key_long))

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Make DeepSpeed compute in a precision, if its configuration leaves the precision open.

        Transformers' ``TrainingArguments`` call this method.

        Args:
            mixed_precision: "no", "fp16" or "bf16".

        Raises:
            ConfigError: ``mixed_precision`` is "fp16" and the configuration enables bf16, or the
                other way round.
        """
        self.resolve_precision(mixed_precision)
        for name in ("fp16", "bf16"):
            if is_open(self.get_value(f"{name}.enabled")):
                self.hf_ds_config.set_value(f"{name}.enabled", name == mixed_precision)

    def is_zero3_init_enabled(self) -> bool:
        """Return whether Transformers' ``from_pretrained`` shards weights as it reads them."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Return a context in which Transformers' ``from_pretrained`` shards weights, or does not.

        Args:
            enable: whether ``from_pretrained`` shards weights as it reads them. After the block the
                former setting holds.
        """
        before, self.zero3_init_flag = self.zero3_init_flag, enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Tell Transformers whether ``from_pretrained`` is to shard weights as it reads them.

        If the user did not set ``zero3_init_flag`` to True, this is done only if the script has
        already imported Transformers, since importing it here would take seconds.
        """
        if not (self._wants_init or "transformers" in sys.modules):
            return
        if not (is_installed("transformers") and is_installed("accelerate")):
            # Transformers reads the configuration by a class of Accelerate, and raises without it.
            if self._wants_init:
                notice_once(
                    "zero3 init",
                    "zero3_init_flag has no effect: Transformers puts weights in parts as it reads "
                    "them where accelerate is installed. pip install transformers accelerate",
                )
            return
        # By name: no dependency, but a library that a training may use beside this one.
        integration: Any = importlib.import_module("transformers.integrations.deepspeed")
        integration.unset_hf_deepspeed_config()
        self.dschf = None
        if not self.zero3_init_flag:
            return
        # It wants numbers where ``prepare`` is yet to fill them in; none of them counts for how
        # weights are read.
        config = HfDeepSpeedConfig(self.deepspeed_config).fill(
            {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 1}
        )
        config.setdefault("train_micro_batch_size_per_gpu", 1)
        # It keeps no more than a weak reference.
        self.dschf = integration.HfDeepSpeedConfig(config)

    def set_moe_leaf_modules(self, model: Module) -> None:
        """Have ZeRO stage 3 gather each mixture-of-experts layer of a model as a whole.

        ``transformer_moe_cls_names`` names the classes of these layers; if it is empty, nothing is
        done.

        Raises:
            ConfigError: one of these classes has no layer in the model.
        """
        if not self.transformer_moe_cls_names:
            return
        from deepspeed.utils import set_z3_leaf_modules

        names = {name.strip() for name in self.transformer_moe_cls_names.split(",")}
        kinds = {type(part) for part in model.modules() if type(part).__name__ in names}
        if len(kinds) < len(names):
            raise ConfigError(
                f"transformer_moe_cls_names={self.transformer_moe_cls_names!r}: expected classes "
                f"of layers, and {type(model).__name__} has {len(kinds)} of these {len(names)}"
            )
        set_z3_leaf_modules(model, [*kinds])

    def resolve_precision(self, asked: str | None) -> str | None:
        """Return the mixed precision of the DeepSpeed configuration if it sets one, else ``asked``.

        Args:
            asked: the ``mixed_precision`` of ``Accelerator``; None if the user gave none.

        Raises:
            ConfigError: the configuration enables fp16 or bf16, and ``asked`` (if None: the
                variable ACCELERATE_MIXED_PRECISION) names another mixed precision. "no" is no
                conflict: the configuration's precision is used.
        """
        wanted = (asked or environment.read("MIXED_PRECISION") or "no").lower()
        for name in ("fp16", "bf16"):
            if self.get_value(f"{name}.enabled") is True:
                if wanted not in ("no", name):
                    raise ConfigError(
                        f"mixed_precision={wanted!r}, and the DeepSpeed configuration has "
                        f'{name}.enabled: true. Give one of them, or set {name}.enabled to "auto"'
                    )
                return name
        return asked

    def resolve_steps(self, asked: int | None) -> int | None:
        """Return the batches per optimizer step: the plugin's number if it is set, else ``asked``.

        Args:
            asked: the ``gradient_accumulation_steps`` of ``Accelerator``; None if the user gave
                none.
        """
        own = self.gradient_accumulation_steps
        if own == AUTO:
            return asked
        if asked not in (None, own):
            notice_once(
                "deepspeed accumulation",
                f"gradient_accumulation_steps={own} of the DeepSpeedPlugin is used, not the "
                f"Accelerator's {asked}",
            )
        return int(own)


_ZERO = "zero_optimization."


class DummyOptim(torch.optim.Optimizer):
    """Placeholder for the optimizer in the section "optimizer" of a DeepSpeed configuration.

    ``prepare`` returns DeepSpeed's optimizer in its place.

    Attributes:
        params: the parameters or groups, as given.
        lr, weight_decay, kwargs: values for entries of that section that are "auto".
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        """Store the parameters, and the values for "auto" entries of the configuration.

        Args:
            params: parameters, or dictionaries of parameter groups.
            lr: learning rate, used if the configuration says "auto".
            weight_decay: weight decay, used if the configuration says "auto".
            **kwargs: values for further "auto" entries, such as ``betas`` and ``eps``.
        """
        given = list(params)
        # The base class completes the groups in place; DeepSpeed gets them as they were.
        self.params = [dict(one) if isinstance(one, dict) else one for one in given]
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        super().__init__(given, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> NoReturn:
        """Raise: the placeholder was not replaced by DeepSpeed's optimizer in ``prepare``.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(_alone("DummyOptim", "optimizer"))


class DummyScheduler(LRScheduler):
    """Placeholder for the scheduler in the section "scheduler" of a DeepSpeed configuration.

    ``prepare`` returns DeepSpeed's scheduler in its place.

    Attributes:
        optimizer, total_num_steps, warmup_num_steps, lr_scheduler_callable, kwargs: the arguments
            of the constructor, unchanged.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Store the values for "auto" entries of the configuration.

        Args:
            optimizer: the optimizer whose learning rates the scheduler sets.
            total_num_steps: length of the schedule. As for every prepared scheduler, it counts
                batches of the loader before ``prepare``: ``num_epochs * len(loader)``. None leaves
                it to the configuration.
            warmup_num_steps: steps until the full learning rate, counted in the same way.
            lr_scheduler_callable: called with the optimizer; returns a scheduler to use instead of
                the one in the configuration.
            **kwargs: values for further "auto" entries.
        """
        # Not the base class's, which would begin a schedule.
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self, epoch: int | None = None) -> NoReturn:
        """Raise: the placeholder was not replaced by DeepSpeed's scheduler in ``prepare``.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(_alone("DummyScheduler", "scheduler"))


def _alone(name: str, what: str) -> str:
    return (
        f"{name}.step() was called: it stands for the {what} of a DeepSpeed configuration, and "
        "none was put in its place. Make the Accelerator with a DeepSpeedPlugin and pass the "
        f"{name} to prepare() beside the model, or use a {what} of torch"
    )


def complete(
    plugin: DeepSpeedPlugin, model: Module, call: PrepareCall, request: Request
) -> dict[str, Any]:
    """Complete the plugin's configuration in place, and return it without "auto" entries."""
    topology, num_steps = request.topology, request.accumulation.num_steps
    config = plugin.hf_ds_config
    config.reopen()
    for name in ("fp16", "bf16"):
        if is_open(plugin.get_value(f"{name}.enabled")):
            config.set_value(f"{name}.enabled", AUTO)
    num_batches = num_steps * topology.num_processes
    micro = plugin.get_value("train_micro_batch_size_per_gpu")
    if is_open(micro):
        micro = (min if plugin.is_train_batch_min else max)(call.batch_sizes, default=None)
    if micro is None:
        total = plugin.get_value("train_batch_size")
        micro = 1 if is_open(total) else max(1, total // num_batches)
    values = {
        "train_batch_size": micro * num_batches,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": num_steps,
        "gradient_clipping": 0.0,
        "fp16.enabled": request.precision.name == "fp16",
        "bf16.enabled": request.precision.name == "bf16",
        _ZERO + "stage3_gather_16bit_weights_on_model_save": False,
        **_buckets(model),
    }
    for optimizer in call.optimizers:
        if isinstance(optimizer, DummyOptim):
            settings = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
            settings |= optimizer.kwargs
            values |= {f"optimizer.params.{name}": value for name, value in settings.items()}
    for scheduler in call.schedulers:
        if isinstance(scheduler, DummyScheduler):
            settings = _schedule(scheduler, call.schedule_steps)
            values |= {f"scheduler.params.{name}": value for name, value in settings.items()}
    made: dict[str, Any] = config.fill(values)
    # DeepSpeed's default clips every training at 1.
    made.setdefault("gradient_clipping", 0.0)
    # As it is now: code may have set it at the Accelerator since.
    made["gradient_accumulation_steps"] = num_steps
    made.setdefault("train_micro_batch_size_per_gpu", micro)
    # Which optimizers DeepSpeed tried is no reason to refuse the user's own, nor to change it for
    # another on the host.
    made.setdefault("zero_allow_untested_optimizer", True)
    made.setdefault("zero_force_ds_cpu_optimizer", False)
    if topology.device.type == "cpu" and "params" in made.get("optimizer", {}):
        # DeepSpeed's own Adam is compiled at its first use, which takes minutes and a compiler.
        made["optimizer"]["params"].setdefault("torch_adam", True)
    return made


def _buckets(model: Module) -> dict[str, Any]:
    """Return ZeRO's bucket sizes by a Transformers model's hidden size; else nothing."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    widths = getattr(config, "hidden_sizes", None) or [getattr(config, "hidden_size", None) or 0]
    width = max(widths)
    if not isinstance(width, int) or not width:
        return {}
    return {
        _ZERO + "reduce_bucket_size": width * width,
        _ZERO + "stage3_prefetch_bucket_size": int(0.9 * width * width),
        _ZERO + "stage3_param_persistence_threshold": 10 * width,
    }


def _schedule(placeholder: DummyScheduler, schedule_steps: int) -> dict[str, Any]:
    """Return arguments for DeepSpeed's learning-rate schedule, taken from a ``DummyScheduler``.

    DeepSpeed's schedule advances by 1 with each optimizer step, a prepared scheduler by
    ``schedule_steps``. So the step counts of the placeholder are divided by ``schedule_steps``.
    """
    steps = math.ceil(placeholder.warmup_num_steps / schedule_steps)
    values: dict[str, Any] = {
        "warmup_min_lr": 0,
        "warmup_max_lr": max(group["lr"] for group in placeholder.optimizer.param_groups),
        # DeepSpeed refuses a warm-up of no step.
        "warmup_num_steps": max(1, steps),
        **placeholder.kwargs,
    }
    if placeholder.total_num_steps is not None:
        values["total_num_steps"] = math.ceil(placeholder.total_num_steps / schedule_steps)
    return values
