"""``FullyShardedDataParallelPlugin``, the settings with which a user asks for FSDP.

Its fields and environment variables are those of Hugging Face Accelerate. A field left at None
takes its value from its environment variable, else from its default. Fields accept torch's own
classes (``FullStateDictConfig``, ``ShardingStrategy``, ...), which are imported only when a plugin
is made.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from notebook_accel.config.checks import parse_flag
from notebook_accel.config.plugins import FsdpOptions
from notebook_accel.config.setting import documented, settings_of
from notebook_accel.errors import ConfigError
from notebook_accel.rank.this_rank import current
from notebook_accel.training.settings import environment
from notebook_accel.training.settings.handlers import StrategyPlugin
from notebook_accel.training.settings.notices import notice_once

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

_WRAPS = settings_of(FsdpOptions)["auto_wrap_policy"].choices
# What the environment says of these depends on other fields.
_BY_OTHER_FIELDS = ("reshard_after_forward", "state_dict_type")


@documented
@dataclass
class FullyShardedDataParallelPlugin(StrategyPlugin, FsdpOptions):
    """Settings of FSDP: each rank has a shard of the weights, gradients and optimizer states.

    Torch's ``fully_shard`` (FSDP2) does the sharding for both values of ``fsdp_version``. Options
    that only FSDP1 has (``use_orig_params``, ``limit_all_gathers``, prefetching) are accepted
    without effect.

    Raises:
        ConfigError: a field has an unknown value.

    Example:
        >>> from notebook_accel import (
        ...     Accelerator, FullyShardedDataParallelPlugin, notebook_launcher
        ... )
        >>> def train():
        ...     plugin = FullyShardedDataParallelPlugin(cpu_offload=False)
        ...     return Accelerator(fsdp_plugin=plugin).distributed_type == "FSDP"
        >>> run = notebook_launcher(train, num_processes=2)
        >>> run.results
        [True, True]
    """

    switch = "USE_FSDP"

    def __post_init__(self) -> None:
        for name, option in settings_of(FsdpOptions).items():
            if getattr(self, name) is None and name not in _BY_OTHER_FIELDS:
                setattr(self, name, option.from_environment())
        if self.fsdp_version not in (1, 2):
            raise ConfigError(f"fsdp_version={self.fsdp_version!r}: expected 1 or 2")
        self._resolve_sharding()
        self._resolve_wrapping()
        self.set_state_dict_type()
        self._resolve_policies()
        if self.ignored_modules is not None and not isinstance(self.ignored_modules, str):
            self.ignored_modules = list(self.ignored_modules)
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            notice_once(
                "FSDP weights of rank 0",
                "sync_module_states=False is not used: with cpu_ram_efficient_loading=True rank 0 "
                "alone has read the weights, and all ranks start from them",
            )
            self.sync_module_states = True
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigError(
                "activation_checkpointing_offload=True is about what activation checkpointing "
                "keeps: set activation_checkpointing=True too"
            )

    @classmethod
    def resolve(cls, argument: str, given: Any) -> FullyShardedDataParallelPlugin | None:
        """Return the plugin as :meth:`StrategyPlugin.resolve` does.

        If ``given`` is a plugin, Transformers is also told, by environment variables, whether to
        read weights on rank 0 only. The variables that an earlier ``Accelerator`` changed in this
        way are restored first.
        """
        for name, text in current().shared.pop(_SAID, {}).items():
            os.environ.pop(name, None)
            os.environ.update({} if text is None else {name: text})
        plugin: Any = super().resolve(argument, given)
        known = environment.FSDP_READS_ON_RANK_0, environment.USE_FSDP
        if given is None or not (plugin.cpu_ram_efficient_loading or known[0] in os.environ):
            return plugin  # type: ignore[no-any-return]
        # Kept, since the next Accelerator reads USE_FSDP too, and would use FSDP although it was
        # given no plugin.
        current().shared[_SAID] = {name: os.environ.get(name) for name in known}
        if plugin.cpu_ram_efficient_loading:
            environment.enable_fsdp_ram_efficient_loading()
        else:
            environment.disable_fsdp_ram_efficient_loading()
        return plugin  # type: ignore[no-any-return]

    def _resolve_sharding(self) -> None:
        from torch.distributed.fsdp import ShardingStrategy

        strategy = self.sharding_strategy
        reshards = self.reshard_after_forward
        if reshards is None:
            reshards = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "").strip() or None
            # Accelerate's launcher sets both variables, this one to "true" unless told otherwise;
            # in version 1 the strategy says it.
            if self.fsdp_version == 1 and strategy and str(reshards).lower() == "true":
                reshards = None
        is_strategy = isinstance(reshards, ShardingStrategy)
        if is_strategy or str(reshards).upper() in map(_name, ShardingStrategy):  # in version 1
            strategy, reshards = reshards, None
        self.sharding_strategy = _member(ShardingStrategy, strategy, "sharding_strategy")
        if reshards is None:
            kept = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
            reshards = self.sharding_strategy is None or _name(self.sharding_strategy) not in kept
        elif isinstance(reshards, str):
            reshards = parse_flag("reshard_after_forward", reshards)
        self.reshard_after_forward = reshards

    def _resolve_policies(self) -> None:
        from torch.distributed import fsdp

        if isinstance(self.cpu_offload, bool) and self.fsdp_version == 1:
            self.cpu_offload = fsdp.CPUOffload(offload_params=self.cpu_offload)
        elif isinstance(self.cpu_offload, bool):
            self.cpu_offload = fsdp.CPUOffloadPolicy() if self.cpu_offload else fsdp.OffloadPolicy()
        if not isinstance(self.cpu_offload, (fsdp.CPUOffload, fsdp.OffloadPolicy)):
            raise ConfigError(
                f"cpu_offload={self.cpu_offload!r}: expected True, False, or a CPUOffloadPolicy or "
                "CPUOffload of torch.distributed.fsdp"
            )
        given = self.mixed_precision_policy
        if isinstance(given, (str, torch.dtype)):
            self.set_mixed_precision(given, override=True)
        elif isinstance(given, Mapping):
            self._set_precision_policy(**given)
        elif given and not isinstance(given, (fsdp.MixedPrecision, fsdp.MixedPrecisionPolicy)):
            raise ConfigError(
                f"mixed_precision_policy={given!r}: expected a MixedPrecisionPolicy or "
                "MixedPrecision of torch.distributed.fsdp, the name of a type, or a dict"
            )

    def _resolve_wrapping(self) -> None:
        from torch.distributed.fsdp import wrap

        policy = self.auto_wrap_policy
        # Torch's own functions lack what the fields below say, such as the classes.
        if policy is wrap.transformer_auto_wrap_policy:
            policy = "transformer_based_wrap"
        if policy is wrap.size_based_auto_wrap_policy:
            policy = "size_based_wrap"
        self.auto_wrap_policy = policy.lower() if isinstance(policy, str) else policy
        if not callable(policy) and self.auto_wrap_policy not in _WRAPS:
            is_text = isinstance(policy, str)
            given = f"={policy!r}" if is_text else f" is a {type(policy).__name__}"
            raise ConfigError(
                f"auto_wrap_policy{given}: expected one of {_WRAPS}, or a function (module, "
                "recurse, nonwrapped_numel) -> bool, such as torch's ModuleWrapPolicy({Block})"
            )
        names = self.transformer_cls_names_to_wrap
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        self.transformer_cls_names_to_wrap = names or None

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose whether ``save_state`` will write whole weights or shards.

        All ranks have to choose the same.

        Args:
            state_dict_type: a ``StateDictType`` of torch, its name or its number. None keeps the
                field ``state_dict_type``. If that is None too, the variable FSDP_STATE_DICT_TYPE
                decides, else the class of ``state_dict_config``, else ``fsdp_version`` (1: whole,
                2: shards).

        Raises:
            ConfigError: the type is unknown, or it is LOCAL_STATE_DICT with ``fsdp_version=2``.
        """
        from torch.distributed import fsdp

        given = state_dict_type or self.state_dict_type or os.environ.get("FSDP_STATE_DICT_TYPE")
        if given is None:
            is_full = self.fsdp_version == 1
            if self.state_dict_config is not None:
                is_full = isinstance(self.state_dict_config, fsdp.FullStateDictConfig)
            given = "FULL_STATE_DICT" if is_full else "SHARDED_STATE_DICT"
        found = _member(fsdp.StateDictType, given, "state_dict_type")
        if self.fsdp_version == 2 and found is fsdp.StateDictType.LOCAL_STATE_DICT:
            raise ConfigError(
                "state_dict_type=LOCAL_STATE_DICT with fsdp_version=2: expected FULL_STATE_DICT or "
                "SHARDED_STATE_DICT"
            )
        self.state_dict_type = found

    @property
    def saves_shards(self) -> bool:
        """Whether in ``save_state`` each rank writes its shards; if not, rank 0 writes all."""
        return str(self.state_dict_type.name) != "FULL_STATE_DICT"

    def wrap_policy(self, model: Module) -> Callable[..., bool] | None:
        """Return torch's wrap policy: the function that chooses the modules to shard separately.

        FSDP gathers the weights of each such module when that module runs. Without a policy (None)
        all weights of the model are gathered at once.
        """
        if callable(self.auto_wrap_policy):
            return self.auto_wrap_policy  # type: ignore[no-any-return]
        from torch.distributed.fsdp import wrap

        if self.auto_wrap_policy == "size_based_wrap" and self.min_num_params:
            return functools.partial(
                wrap.size_based_auto_wrap_policy, min_num_params=self.min_num_params
            )
        if self.auto_wrap_policy == "size_based_wrap":
            notice_once(
                "wrap from which size",
                'auto_wrap_policy="size_based_wrap" with min_num_params=0 wraps nothing, as in '
                "Accelerate, and the model is gathered as a whole: set min_num_params",
            )
            return None
        if self.auto_wrap_policy == "no_wrap":
            return None
        names = self.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None)
        kinds = {type(part) for part in model.modules() if type(part).__name__ in (names or ())}
        if not kinds:
            # No error: of two models that are prepared, one may have no such layers.
            notice_once(
                f"wrap {type(model).__name__}",
                f'auto_wrap_policy="transformer_based_wrap" found none of the classes '
                f"{list(names or [])} in {type(model).__name__}, which is gathered as a whole: "
                "name its layers' class in transformer_cls_names_to_wrap",
            )
            return None
        return functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=kinds)

    def set_mixed_precision(
        self, mixed_precision: str | torch.dtype, override: bool = False
    ) -> None:
        """Set ``mixed_precision_policy``, by default only if no policy is set yet.

        Weights are gathered, and gradients are reduced, in the type that is given here.

        Args:
            mixed_precision: "bf16", "fp16", "fp32", "fp8" (weights are then gathered in bf16), or a
                ``torch.dtype`` (bfloat16, float16 or float32).
            override: whether to replace a policy that is set already.

        Raises:
            ConfigError: ``mixed_precision`` is none of these.
        """
        dtype = _dtype(mixed_precision)
        if self.mixed_precision_policy is not None and not override:
            return
        others = "buffer_dtype" if self.fsdp_version == 1 else "output_dtype"
        self._set_precision_policy(param_dtype=dtype, reduce_dtype=dtype, **{others: dtype})

    def _set_precision_policy(self, **given: Any) -> None:
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        fields = {key: _dtype(one) if isinstance(one, str) else one for key, one in given.items()}
        kind: Any = MixedPrecision if self.fsdp_version == 1 else MixedPrecisionPolicy
        unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(kind)})
        if unknown:
            raise ConfigError(
                f"mixed_precision_policy has {unknown}, which {kind.__name__} of "
                f"fsdp_version={self.fsdp_version} has not: expected param_dtype, reduce_dtype, ..."
            )
        self.mixed_precision_policy = kind(**fields)

    def precision_policy(self, dtype: torch.dtype | None) -> MixedPrecisionPolicy:
        """Return FSDP2's policy: the types in which weights are gathered and gradients reduced.

        Args:
            dtype: the type of the Accelerator's ``mixed_precision``; None for full precision. Used
                if the field ``mixed_precision_policy`` is None.
        """
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        given = self.mixed_precision_policy
        if isinstance(given, MixedPrecisionPolicy):
            return given
        if isinstance(given, MixedPrecision):
            return MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype)
        # Gradients are summed over the ranks in float32: it costs twice the traffic of the type
        # itself, and keeps the sums as exact as those of DDP.
        return MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)

    def offload_policy(self, device: torch.device) -> OffloadPolicy:
        """Return FSDP2's offload policy: whether shards are kept in CPU memory when not in use.

        Args:
            device: where the ranks compute.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        given = self.cpu_offload
        offloads = given is True or getattr(given, "offload_params", False)
        if not offloads and not isinstance(given, CPUOffloadPolicy):
            return OffloadPolicy()
        # Torch pins by default, which fails where there is no accelerator to pin for.
        pins = getattr(given, "pin_memory", True) and device.type != "cpu"
        return CPUOffloadPolicy(pin_memory=pins)

    def ignored_parts(self, model: Module) -> list[Module]:
        """Return the modules of ``ignored_modules``, whose weights are not sharded.

        If ``ignored_modules`` is a regular expression, these are the modules whose full name in
        ``model`` it matches.
        """
        given = self.ignored_modules
        if not isinstance(given, str):
            return list(given or ())
        found = [part for name, part in model.named_modules() if re.fullmatch(given, name)]
        if not found:
            # No error: of two models that are prepared, one may have no such modules.
            notice_once(
                f"ignore {type(model).__name__}",
                f"ignored_modules={given!r} matches the name of no module of "
                f"{type(model).__name__}: all its weights are sharded",
            )
        return found


def _member(kind: Any, given: Any, field: str) -> Any:
    """Return the member of the enum ``kind`` that was given as a member, its number or its name."""
    if isinstance(given, kind):
        return given
    text = str(given).strip().upper()
    for member in kind:
        if text in (_name(member), str(member.value)):
            return member
    names = ", ".join(map(_name, kind))
    raise ConfigError(f"{field}={given!r}: expected one of {names}")


def _name(member: Any) -> str:
    # Torch calls one _HYBRID_SHARD_ZERO2, and Accelerate HYBRID_SHARD_ZERO2.
    return str(member.name).lstrip("_")


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}
# What is multiplied in 8 bits travels between ranks in 16.
_DTYPES["fp8"] = torch.bfloat16


def _dtype(given: str | torch.dtype) -> torch.dtype:
    """Return the ``torch.dtype`` of a precision that was given as a dtype or by its name."""
    name = str(given).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(
            f"mixed precision of FSDP by {given!r}: expected one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


# What the environment said before an Accelerator told Transformers something else.
_SAID = "environment before Transformers was told"
