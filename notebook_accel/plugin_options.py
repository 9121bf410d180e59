"""The options of each kind of parallelism that a launch can choose without a line in the function.

    LaunchConfig(fsdp={...}) --check--> variables of Accelerate's launcher --> the plugin in a rank

A rank's ``Accelerator`` that is given no plugin makes one from these variables
(training/fsdp_plugin.py, training/parallelism.py); their names are Hugging Face Accelerate's, so
that its YAML and its launcher mean the same here. Settings, picker and YAML all read this table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from notebook_accel.errors import ConfigError
from notebook_accel.setting_checks import as_index
from notebook_accel.text_values import parse_flag, shown, value_of

__all__ = ["PLUGINS", "Option", "Plugin"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: the plugin's field.
        variable: what carries it to the ranks.
        kind: its type; a number is a whole one from ``least`` to ``most``.
        about: what it does, for the picker.
        choices: the texts that it may be; none for any.
        least: the smallest number.
        most: the largest one; None for any.
        or_choice_of: another option, whose choices Accelerate's YAML may have in this one's place.
        numbers: torch's numbers of the choices, which that YAML may have in their place.
    """

    name: str
    variable: str
    kind: type
    about: str
    choices: tuple[str, ...] = ()
    least: int = 1
    most: int | None = None
    or_choice_of: str = ""
    numbers: tuple[int, ...] = ()

    def checked(self, value: Any, plugin: str) -> Any:
        """The value as a plain one: of numpy's, or of an Enum, what it equals.

        Raises:
            ConfigError: it is of another type, or no choice.
        """
        if self.choices:
            fits, expected = value in self.choices, f"one of {', '.join(map(repr, self.choices))}"
        elif self.kind is float:
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            fits = is_number and value > 0
            expected = "a number above 0"
        elif self.kind is int:
            most = math.inf if self.most is None else self.most
            number = as_index(value)
            fits = number is not None and self.least <= number <= most
            last = "or more" if self.most is None else f"to {self.most}"
            expected = f"a whole number, {self.least} {last}"
        else:
            fits = isinstance(value, self.kind)
            expected = "True or False" if self.kind is bool else "text"
        if not fits:
            raise ConfigError(f"{plugin}={{{self.name!r}: {shown(value)}}}: expected {expected}")
        if self.choices:
            return next(choice for choice in self.choices if choice == value)
        if isinstance(value, str):
            return str.__str__(value)
        return value if type(value) in (bool, int, float) else self.kind(value)

    def from_text(self, text: Any) -> Any:
        """The value that a YAML file means, which may have written a flag or a number as text."""
        if type(text) is int and (self.choices or self.kind is bool):
            text = str(text)
        if not isinstance(text, str):
            return text
        lowered = {choice.lower(): choice for choice in self.choices}
        lowered.update(zip(map(str, self.numbers), self.choices, strict=False))
        return lowered.get(text.strip().lower(), value_of(text, self.kind))


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """One kind of parallelism.

    Attributes:
        title: what a person reads in a list.
        about: what it does, in a sentence.
        plugin_class: the class whose fields these are.
        switch: the variable that turns it on.
        section: the name of its part in Accelerate's YAML.
        options: its options.
        without_effect: names in that part which are accepted and change nothing.
        other_names: names in that part that are not the lower case of the variable.
        read_by_ranks: names in that part that are no options, with the texts that they may have:
            ranks read them from a variable of the same name.
        composes: whether it can be asked for beside another one.
        needs_options: whether it changes nothing unless an option is given.
    """

    title: str
    about: str
    plugin_class: str
    switch: str
    section: str
    options: tuple[Option, ...]
    without_effect: tuple[str, ...] = ()
    other_names: Mapping[str, str]
    read_by_ranks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    composes: bool = True
    needs_options: bool = False

    def check(self, name: str, given: object) -> dict[str, Any] | None:
        """The options as a dictionary of their own; None stays None.

        Raises:
            ConfigError: there is no such option, or its value makes no sense.
        """
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{name}={shown(given)}: expected a mapping of {self.plugin_class}'s fields, {{}} "
                "for its defaults"
            )
        options = {option.name: option for option in self.options}
        for key in given:
            if key not in options:
                raise ConfigError(
                    f"{name}={{{shown(key)}: ...}}: no option is called so; there are "
                    f"{', '.join(options)}. Others are fields of {self.plugin_class}, which the "
                    "function gives to its Accelerator"
                )
        return {
            options[key].name: options[key].checked(value, name) for key, value in given.items()
        }

    def variables(self, given: Mapping[str, Any]) -> dict[str, str]:
        """The environment that makes a rank's Accelerator take these options."""
        texts = {
            option.variable: str(given[option.name]).lower()
            if option.kind is bool
            else str(given[option.name])
            for option in self.options
            if option.name in given
        }
        return {self.switch: "true", **texts}

    def asked_by(self, environment: Mapping[str, str]) -> bool | None:
        """Whether the environment turns it on or off; None where it says neither.

        Raises:
            ConfigError: its switch is no flag.
        """
        text = environment.get(self.switch, "").strip()
        return parse_flag(self.switch, text) if text else None

    def left_open(self, given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
        """The given options of which the environment says nothing itself."""
        set_there = {
            option.name for option in self.options if environment.get(option.variable, "").strip()
        }
        return {name: value for name, value in given.items() if name not in set_there}

    def from_accelerate(self, section: object) -> dict[str, Any]:
        """The options that this part of Accelerate's YAML gives.

        Raises:
            ConfigError: it has a name that cannot be carried over.
        """
        if section is None:
            return {}
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"{self.section}: {shown(section)}: expected names with values below it"
            )
        options = {option.name: option for option in self.options}
        by_name = {option.variable.lower(): option for option in self.options}
        for other, variable in self.other_names.items():
            by_name[other] = by_name[variable.lower()]
        found: dict[str, Any] = {}
        for name, value in section.items():
            unused = name in self.without_effect or value in (None, "", "auto")
            if unused or name in self.read_by_ranks:
                continue
            if name not in by_name:
                known = ", ".join((*by_name, *self.read_by_ranks))
                raise ConfigError(f"{self.section}: {name}: not supported; there are {known}")
            option = by_name[name]
            instead = options.get(option.or_choice_of)
            meant = option.from_text(value)
            if instead is not None and not isinstance(meant, bool):
                choice = instead.from_text(value)
                if choice in instead.choices:
                    option, meant = instead, choice
            found[option.name] = meant
        return found

    def variables_of_accelerate(self, section: Mapping[str, Any]) -> dict[str, str]:
        """What this part of Accelerate's YAML says that is no option, as variables of the ranks.

        Raises:
            ConfigError: a value is not one of those that there are.
        """
        found = {}
        for name, choices in self.read_by_ranks.items():
            value = section.get(name)
            if value in (None, ""):
                continue
            if value not in choices:
                raise ConfigError(
                    f"{self.section}: {name}: {shown(value)}: expected one of "
                    f"{', '.join(map(repr, choices))}"
                )
            found[name.upper()] = str(value)
        return found


def _size(name: str, about: str) -> Option:
    variable = f"PARALLELISM_CONFIG_{name.upper()}"
    return Option(name=name, variable=variable, kind=int, about=about)


PLUGINS: Mapping[str, Plugin] = {
    "fsdp": Plugin(
        title="FSDP",
        about="FSDP: each rank keeps a part of the weights, gradients and optimizer states.",
        plugin_class="FullyShardedDataParallelPlugin",
        switch="ACCELERATE_USE_FSDP",
        section="fsdp_config",
        options=(
            Option(
                name="sharding_strategy",
                variable="FSDP_SHARDING_STRATEGY",
                kind=str,
                about="what is divided among the ranks, and among which of them",
                choices=(
                    "FULL_SHARD",
                    "SHARD_GRAD_OP",
                    "NO_SHARD",
                    "HYBRID_SHARD",
                    "HYBRID_SHARD_ZERO2",
                ),
                numbers=(1, 2, 3, 4, 5),
            ),
            Option(
                name="auto_wrap_policy",
                variable="FSDP_AUTO_WRAP_POLICY",
                kind=str,
                about="how FSDP chooses the modules whose weights it gathers as they run",
                choices=("transformer_based_wrap", "size_based_wrap", "no_wrap"),
            ),
            Option(
                name="min_num_params",
                variable="FSDP_MIN_NUM_PARAMS",
                kind=int,
                about="weights that a module has at least for size_based_wrap to choose it",
            ),
            Option(
                name="transformer_cls_names_to_wrap",
                variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
                kind=str,
                about="classes of the modules that transformer_based_wrap chooses, with commas",
            ),
            Option(
                name="reshard_after_forward",
                variable="FSDP_RESHARD_AFTER_FORWARD",
                kind=bool,
                about="drop gathered weights between forward and backward",
                or_choice_of="sharding_strategy",  # version 1
            ),
            Option(
                name="cpu_offload",
                variable="FSDP_OFFLOAD_PARAMS",
                kind=bool,
                about="keep the parts in the memory of the CPU",
            ),
            Option(
                name="activation_checkpointing",
                variable="FSDP_ACTIVATION_CHECKPOINTING",
                kind=bool,
                about="compute activations again in backward, for less memory",
            ),
            Option(
                name="state_dict_type",
                variable="FSDP_STATE_DICT_TYPE",
                kind=str,
                about="whether save_state writes whole weights, or each rank its part",
                choices=("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
                numbers=(1, 3),
            ),
            Option(
                name="sync_module_states",
                variable="FSDP_SYNC_MODULE_STATES",
                kind=bool,
                about="all ranks start from rank 0's weights",
            ),
            Option(
                name="cpu_ram_efficient_loading",
                variable="FSDP_CPU_RAM_EFFICIENT_LOADING",
                kind=bool,
                about="rank 0 alone reads the weights",
            ),
            Option(
                name="fsdp_version",
                variable="FSDP_VERSION",
                kind=int,
                about="1 or 2: whose defaults checkpoints have; both train by FSDP2",
                most=2,
            ),
        ),
        without_effect=(
            "fsdp_backward_prefetch",
            "fsdp_backward_prefetch_policy",
            "fsdp_forward_prefetch",
            "fsdp_use_orig_params",
        ),
        other_names={"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"},
    ),
    "deepspeed": Plugin(
        title="DeepSpeed",
        about="DeepSpeed (ZeRO): each rank keeps a part of what its stage names.",
        plugin_class="DeepSpeedPlugin",
        switch="ACCELERATE_USE_DEEPSPEED",
        section="deepspeed_config",
        options=(
            Option(
                name="zero_stage",
                variable="ACCELERATE_DEEPSPEED_ZERO_STAGE",
                kind=int,
                about="divided among the ranks: 1 optimizer states, 2 gradients too, 3 weights too",
                least=0,
                most=3,
            ),
            Option(
                name="gradient_accumulation_steps",
                variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
                kind=int,
                about="batches whose gradients are added up for each step",
            ),
            Option(
                name="gradient_clipping",
                variable="ACCELERATE_GRADIENT_CLIPPING",
                kind=float,
                about="largest norm of the gradients",
            ),
            Option(
                name="offload_optimizer_device",
                variable="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
                kind=str,
                about="where optimizer states are kept",
                choices=("none", "cpu", "nvme"),
            ),
            Option(
                name="offload_param_device",
                variable="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
                kind=str,
                about="where weights are kept, in stage 3",
                choices=("none", "cpu", "nvme"),
            ),
            Option(
                name="offload_optimizer_nvme_path",
                variable="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
                kind=str,
                about="folder for optimizer states on nvme",
            ),
            Option(
                name="offload_param_nvme_path",
                variable="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
                kind=str,
                about="folder for weights on nvme",
            ),
            Option(
                name="zero3_init_flag",
                variable="ACCELERATE_DEEPSPEED_ZERO3_INIT",
                kind=bool,
                about="from_pretrained divides weights as it reads them, in stage 3",
            ),
            Option(
                name="zero3_save_16bit_model",
                variable="ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
                kind=bool,
                about="let DeepSpeed's own save_16bit_model gather the weights, in stage 3",
            ),
            Option(
                name="transformer_moe_cls_names",
                variable="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
                kind=str,
                about="classes of the layers of experts, which stage 3 gathers whole, with commas",
            ),
            Option(
                name="hf_ds_config",
                variable="ACCELERATE_DEEPSPEED_CONFIG_FILE",
                kind=str,
                about="DeepSpeed's configuration file; what it leaves open is taken from this form",
            ),
        ),
        without_effect=(
            "deepspeed_exclusion_filter",
            "deepspeed_hostfile",
            "deepspeed_inclusion_filter",
            "deepspeed_multinode_launcher",
        ),
        other_names={
            "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
            "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
            "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
            "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
            "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
            "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
            "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
            "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
            "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
            "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
        },
        composes=False,
    ),
    "parallelism": Plugin(
        title="Mesh of ranks",
        about="A mesh: how many ranks each kind of parallelism takes.",
        plugin_class="ParallelismConfig",
        switch="ACCELERATE_USE_PARALLELISM_CONFIG",
        section="parallelism_config",
        options=(
            _size("dp_replicate_size", "copies of the model that read different samples"),
            _size("dp_shard_size", "ranks over which one copy is sharded (FSDP2)"),
            _size("tp_size", "ranks that compute each layer together"),
            _size("cp_size", "ranks that divide each sequence"),
            _size("pp_size", "ranks of a pipeline, whose loop calls accelerator.forward_backward"),
        ),
        other_names={},
        read_by_ranks={"parallelism_config_cp_comm_strategy": ("allgather", "alltoall")},
        needs_options=True,
    ),
}
