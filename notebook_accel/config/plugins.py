"""Kinds of parallelism that a launch's settings choose, without a change to the user's function.

    LaunchConfig(fsdp={...}) --check--> environment variables --> the plugin in a rank

An ``Accelerator`` without a plugin makes it from these variables, which have Accelerate's names.
The options are declared in fsdp_options.py, deepspeed_options.py and mesh_options.py, in base
classes of the plugins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from notebook_accel.config.checks import parse_flag, shown
from notebook_accel.config.deepspeed_options import DeepSpeedOptions
from notebook_accel.config.fsdp_options import FsdpOptions
from notebook_accel.config.mesh_options import MeshOptions
from notebook_accel.config.setting import Setting, settings_of
from notebook_accel.errors import ConfigError


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
                if choice in instead.texts:
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
