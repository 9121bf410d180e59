"""Kinds of parallelism that a launch's settings choose, without a change to the user's function.

    LaunchConfig(fsdp={...}) --check--> environment variables --> the plugin in a rank

An ``Accelerator`` without a plugin makes it from these variables, which have Accelerate's names.
The classes here declare the fields of the public plugins, as settings with checks and variables. A
field that is None takes its value from DeepSpeed's configuration (if it has an entry there), else
from its variable, else from its default. This file imports neither torch nor DeepSpeed, since it is
imported in the notebook's kernel; the code that uses the values in ranks is in training/.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from notebook_accel.config.checks import as_count, parse_flag, shown
from notebook_accel.config.setting import Setting, setting, settings_of
from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

# ---- FSDP ----------------------------------------------------------------------------------

# Accelerate's names have no prefix of their own, and so no twin of ours.
_fsdp = partial(setting, own="", prefix="FSDP_")


@dataclass
class FsdpOptions:
    """Base class of ``FullyShardedDataParallelPlugin`` that declares its fields.

    The fields made by ``_fsdp`` can also be set as ``LaunchConfig(fsdp={...})``.
    """

    fsdp_version: int | None = _fsdp(
        check=partial(as_count, most=2),
        variable="FSDP_VERSION",
        about="1 or 2: whose defaults checkpoints have; both train by FSDP2",
        fallback=1,
    )
    sharding_strategy: Any = _fsdp(
        choices=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
        numbers=(1, 2, 3, 4, 5),
        about="What is divided among the ranks, and among which of them: SHARD_GRAD_OP keeps "
        "weights whole between forward and backward; HYBRID_SHARD shards within a machine and "
        "replicates over machines",
        fallback="FULL_SHARD",
    )
    reshard_after_forward: Any = _fsdp(
        kind=bool,
        or_choice_of="sharding_strategy",  # version 1
        about="Drop gathered weights between forward and backward",
        unset="by sharding_strategy",
    )
    backward_prefetch: Any = None
    """Accepted."""
    mixed_precision_policy: Any = None
    """A ``MixedPrecisionPolicy`` or ``MixedPrecision``, or what one is made of: the name of a type,
    or a dict. None follows the Accelerator's ``mixed_precision``."""
    auto_wrap_policy: Any = _fsdp(
        choices=("transformer_based_wrap", "size_based_wrap", "no_wrap"),
        about="How FSDP chooses the modules whose weights it gathers as they run; in code also a "
        "function (module, recurse, nonwrapped_numel) -> bool",
        fallback="no_wrap",
    )
    cpu_offload: Any = _fsdp(
        kind=bool,
        variable="FSDP_OFFLOAD_PARAMS",
        about="Keep the parts in the memory of the CPU",
        fallback=False,
    )
    ignored_modules: Iterable[Module] | str | None = _fsdp(
        about="A regular expression: names of modules whose weights every rank keeps whole; in "
        "code also the modules"
    )
    state_dict_type: Any = _fsdp(
        choices=("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
        numbers=(1, 3),
        about="Whether save_state writes whole weights, or each rank its part; with a full config "
        "in code, whole ones",
        unset="version 1: whole, 2: parts",
    )
    state_dict_config: Any = None
    """Such as ``FullStateDictConfig(offload_to_cpu=True, rank0_only=True)``."""
    optim_state_dict_config: Any = None
    """Such as ``FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)``."""
    limit_all_gathers: bool = True
    """Accepted."""
    use_orig_params: bool | None = False
    """Accepted: parameters always are the user's own."""
    param_init_fn: Callable[[Module], None] | None = None
    """Fills the weights of a module that was made on the meta device."""
    sync_module_states: bool | None = _fsdp(
        about="All ranks start from rank 0's weights", fallback=True
    )
    forward_prefetch: bool | None = False
    """Accepted."""
    activation_checkpointing: bool | None = _fsdp(
        about="Compute activations of the wrapped modules again in backward, for less memory",
        fallback=False,
    )
    activation_checkpointing_offload: bool | None = _fsdp(
        about="Keep what activation checkpointing needs, the inputs of the wrapped modules, in the "
        "memory of the CPU",
        fallback=False,
    )
    cpu_ram_efficient_loading: bool | None = _fsdp(
        about="Rank 0 alone reads the weights", fallback=False
    )
    transformer_cls_names_to_wrap: list[str] | str | None = _fsdp(
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        yaml="fsdp_transformer_layer_cls_to_wrap",
        about="Classes of the modules that transformer_based_wrap chooses, with commas",
        unset="the model's ``_no_split_modules``",
        fallback="",
    )
    min_num_params: int | None = _fsdp(
        check=partial(as_count, least=0),
        about="size_based_wrap: minimum number of parameters of a wrapped module; 0 wraps nothing",
        fallback=0,
    )


# ---- DeepSpeed -----------------------------------------------------------------------------

_ZERO = "zero_optimization."
_DEVICES = ("none", "cpu", "nvme")


def _deepspeed(stem: str, about: str, **row: Any) -> Any:
    """Return a field whose ``NOTEBOOK_ACCEL_<stem>`` wins over ``ACCELERATE_<stem>``."""
    variables = {"variable": f"ACCELERATE_{stem}", "own": f"NOTEBOOK_ACCEL_{stem}"}
    return setting(about=about, **variables, **row)


@dataclass
class DeepSpeedOptions:
    """Base class of ``DeepSpeedPlugin`` that declares its fields.

    The fields made by ``_deepspeed`` can also be set as ``LaunchConfig(deepspeed={...})``.
    """

    hf_ds_config: Any = _deepspeed(
        "DEEPSPEED_CONFIG_FILE",
        "DeepSpeed's configuration file; what it leaves open is taken from the other options. In "
        "code also a dictionary",
        yaml="deepspeed_config_file",
    )
    gradient_accumulation_steps: Any = _deepspeed(
        # The Accelerator reads this variable, and its argument goes before it.
        "GRADIENT_ACCUMULATION_STEPS",
        "Batches whose gradients are added up for each step",
        kind=int,
        unset="the Accelerator's",
        entry="gradient_accumulation_steps",
    )
    gradient_clipping: Any = _deepspeed(
        "GRADIENT_CLIPPING",
        "Largest norm of the gradients",
        kind=float,
        unset="by ``clip_grad_norm_`` alone",
        entry="gradient_clipping",
        fallback="auto",
    )
    zero_stage: int | None = _deepspeed(
        "DEEPSPEED_ZERO_STAGE",
        "Divided among the ranks: 1 optimizer states, 2 gradients too, 3 weights too",
        check=partial(as_count, most=3),
        entry=_ZERO + "stage",
        fallback=2,
    )
    is_train_batch_min: bool = True
    """Of several loaders with different batch sizes, whether the smallest or the largest counts."""
    offload_optimizer_device: str | None = _deepspeed(
        "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "Where optimizer states are kept",
        choices=_DEVICES,
        entry=_ZERO + "offload_optimizer.device",
        fallback="none",
    )
    offload_param_device: str | None = _deepspeed(
        "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        "Where weights are kept, in stage 3",
        choices=_DEVICES,
        entry=_ZERO + "offload_param.device",
        fallback="none",
    )
    offload_optimizer_nvme_path: str | None = _deepspeed(
        "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
        "Folder for optimizer states on nvme",
        entry=_ZERO + "offload_optimizer.nvme_path",
    )
    offload_param_nvme_path: str | None = _deepspeed(
        "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
        "Folder for weights on nvme",
        entry=_ZERO + "offload_param.nvme_path",
    )
    zero3_init_flag: bool | None = _deepspeed(
        "DEEPSPEED_ZERO3_INIT",
        "``from_pretrained`` of Transformers divides weights as it reads them, in stage 3",
        unset="True in stage 3",
    )
    zero3_save_16bit_model: bool | None = _deepspeed(
        "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        "Let DeepSpeed's own save_16bit_model gather the weights, in stage 3",
        entry=_ZERO + "stage3_gather_16bit_weights_on_model_save",
        fallback=False,
    )
    transformer_moe_cls_names: str | None = _deepspeed(
        "DEEPSPEED_MOE_LAYER_CLS_NAMES",
        "Classes of the layers of experts, which stage 3 gathers whole, with commas",
        yaml="deepspeed_moe_layer_cls_names",
    )
    enable_msamp: bool | None = None
    """True is refused: MS-AMP is not there."""
    msamp_opt_level: str | None = None
    """Accepted."""


# ---- a mesh of ranks -----------------------------------------------------------------------

_size = partial(setting, own="", prefix="PARALLELISM_CONFIG_", fallback=1)


@dataclass
class MeshOptions:
    """Base class of ``ParallelismConfig`` that declares its fields.

    The sizes made by ``_size`` can also be set as ``LaunchConfig(parallelism={...})``.
    """

    dp_replicate_size: int | None = _size(
        about="Copies of the model (or of its shards) that read different samples"
    )
    dp_shard_size: int | None = _size(
        about="Ranks over which one copy is sharded (FSDP2), each with its own samples"
    )
    tp_size: int | None = _size(about="Ranks that compute each layer together")
    cp_size: int | None = _size(
        about="Ranks that divide each sequence; the loop trains inside "
        "``accelerator.maybe_context_parallel``. Weights are sharded over them, too"
    )
    cp_backend: str | None = None
    """There is "torch" alone. Variable PARALLELISM_CONFIG_CP_BACKEND."""
    sp_size: int | None = None
    """Refused beyond 1: sequences are divided by ``cp_size``."""
    sp_backend: str | None = None
    """There is "deepspeed" alone. Variable PARALLELISM_CONFIG_SP_BACKEND."""
    tp_handler: Any = None
    """A ``TorchTensorParallelConfig``."""
    cp_handler: Any = None
    """A ``TorchContextParallelConfig``."""
    sp_handler: Any = None
    """Accepted."""
    pp_size: int | None = _size(
        about="Ranks of a pipeline, over which the model's blocks are divided; the loop calls "
        "``accelerator.forward_backward``. Composes with all but ``cp_size``"
    )
    pp_schedule: str = "1F1B"
    """In which order the stages work: "1F1B", "GPipe" or "Interleaved1F1B" (two stages a rank)."""
    num_microbatches: int | None = None
    """Parts of a batch that follow each other through the pipeline; None: two a rank."""
    tp_plan: Mapping[str, Any] | None = None
    """How layers are divided: module name, or pattern with ``*``, to "colwise", "rowwise", or a
    ``ParallelStyle`` of torch; None takes the model's own ``tp_plan`` or ``_tp_plan``."""


# ---- the table -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A kind of parallelism (FSDP, DeepSpeed, a mesh) that settings can choose.

    Attributes:
        title, about: for the user.
        plugin_class: the public class, whose base ``options_class`` declares the options.
        switch: environment variable that turns this kind on.
        section: its name in Accelerate's YAML.
        without_effect, read_by_ranks: entries that change nothing; that ranks read.
        composes: goes with others that also compose.
        needs_options: turning it on without an option changes nothing.
    """

    title: str
    about: str
    plugin_class: str
    options_class: type
    switch: str
    section: str
    without_effect: tuple[str, ...] = ()
    read_by_ranks: tuple[str, ...] = ()
    composes: bool = True
    needs_options: bool = False

    @property
    def options(self) -> Mapping[str, Setting]:
        return settings_of(self.options_class)

    def check(self, name: str, given: object) -> dict[str, Any] | None:
        """Return options without Nones, None (off) as it is; ConfigError says ``name``."""
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{name}={shown(given)}: expected a mapping of {self.plugin_class}'s fields, {{}} "
                "for its defaults"
            )
        for key in given:
            if key not in self.options:
                raise ConfigError(
                    f"{name}={{{shown(key)}: ...}}: no option is called so; there are "
                    f"{', '.join(self.options)}. Others are fields of {self.plugin_class}, which "
                    "the function gives to its Accelerator"
                )
        return {
            key: self.options[key].checked(f"{name}[{key!r}]", value)
            for key, value in given.items()
            if value is not None
        }

    def variables(self, given: Mapping[str, Any]) -> dict[str, str]:
        """From checked options; a rank's Accelerator makes the plugin from them."""
        texts = {
            option.variable: str(given[name]).lower() if option.kind is bool else str(given[name])
            for name, option in self.options.items()
            if name in given
        }
        return {self.switch: "true", **texts}

    @property
    def asked_by_environment(self) -> bool | None:
        """True for on, False for off, None for neither; ConfigError for another text."""
        text = os.environ.get(self.switch, "").strip()
        return parse_flag(self.switch, text) if text else None

    def from_accelerate(self, section: object) -> dict[str, Any]:
        """Return options by our names, without empty ones, "auto" and what only ranks read.

        Raises:
            ConfigError: the section is no mapping, or has an entry that is not supported.
        """
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"{self.section}: {shown(section)}: expected names with values below it"
            )
        by_name: dict[str, Setting] = {}
        for each in self.options.values():
            by_name |= dict.fromkeys((each.variable.lower(), each.yaml or each.name), each)
        found: dict[str, Any] = {}
        for name, value in section.items():
            unused = name in self.without_effect or value in (None, "", "auto")
            if unused or name in self.read_by_ranks:
                continue
            if name not in by_name:
                known = ", ".join((*by_name, *self.read_by_ranks))
                raise ConfigError(f"{self.section}: {name}: not supported; there are {known}")
            option = by_name[name]
            instead = self.options.get(option.or_choice_of)
            meant = option.from_text(value)
            if instead is not None and not isinstance(meant, bool):
                choice = instead.from_text(value)
                if choice in instead.choices:
                    option, meant = instead, choice
            found[option.name] = meant
        return found

    def variables_of_accelerate(self, section: Mapping[str, Any]) -> dict[str, str]:
        found = {name.upper(): section.get(name) for name in self.read_by_ranks}
        return {name: str(value) for name, value in found.items() if value}


PLUGINS: Mapping[str, Plugin] = {
    "fsdp": Plugin(
        title="FSDP",
        about="FSDP: each rank keeps a part of the weights, gradients and optimizer states.",
        plugin_class="FullyShardedDataParallelPlugin",
        options_class=FsdpOptions,
        switch="ACCELERATE_USE_FSDP",
        section="fsdp_config",
        without_effect=(
            *("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy"),
            *("fsdp_forward_prefetch", "fsdp_use_orig_params"),
        ),
    ),
    "deepspeed": Plugin(
        title="DeepSpeed",
        about="DeepSpeed (ZeRO): each rank keeps a part of what its stage names.",
        plugin_class="DeepSpeedPlugin",
        options_class=DeepSpeedOptions,
        switch="ACCELERATE_USE_DEEPSPEED",
        section="deepspeed_config",
        without_effect=(
            *("deepspeed_exclusion_filter", "deepspeed_inclusion_filter"),
            *("deepspeed_hostfile", "deepspeed_multinode_launcher"),
        ),
        composes=False,
    ),
    "parallelism": Plugin(
        title="Mesh of ranks",
        about="A mesh: how many ranks each kind of parallelism takes.",
        plugin_class="ParallelismConfig",
        options_class=MeshOptions,
        switch="ACCELERATE_USE_PARALLELISM_CONFIG",
        section="parallelism_config",
        read_by_ranks=("parallelism_config_cp_comm_strategy",),
        without_effect=("parallelism_config_cp_backend",),
        needs_options=True,
    ),
}
