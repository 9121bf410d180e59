"""DeepSpeed's configuration: a nested dictionary, whose entries are named with dots.

``"zero_optimization.stage"`` is the entry ``stage`` in the section ``zero_optimization``. An entry
that is "auto" is filled in from what is prepared; one for which nothing is known is left out, so
that DeepSpeed's own default holds.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError
from notebook_accel.text_values import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["AUTO", "HfDeepSpeedConfig", "is_open"]

AUTO = "auto"


def is_open(value: Any) -> bool:
    """Whether an entry has no value yet."""
    return value is None or value == AUTO


class HfDeepSpeedConfig:
    """A DeepSpeed configuration, to ask and to complete.

    Attributes:
        config: the dictionary: a copy of one that was given, or that of another such configuration,
            which both then complete.

    Raises:
        ConfigError: what was given is no dictionary, and no file with one.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        """Read the configuration.

        Args:
            config_file_or_dict: a dictionary, or the path of a JSON file.
        """
        self.config: dict[str, Any] = _read(config_file_or_dict)
        # What ``fill`` put in the place of "auto".
        self._filled: dict[str, Any] = {}

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section in which an entry stands (None where there is no such one), and its name."""
        *sections, name = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if not isinstance(node, dict):
                return None, name
        return node, name

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of an entry, or the default where it is not there."""
        node, name = self.find_config_node(ds_key_long)
        return default if node is None else node.get(name, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Set an entry; its sections are made where they are not there."""
        *sections, name = ds_key_long.split(".")
        node = self.config
        for section in sections:
            if not isinstance(node.get(section), dict):
                node[section] = {}
            node = node[section]
        node[name] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove an entry or a section.

        Raises:
            ConfigError: ``must_exist``, and it is not there.
        """
        node, name = self.find_config_node(ds_key_long)
        if node is not None and name in node:
            del node[name]
        elif must_exist:
            raise ConfigError(
                f"the DeepSpeed configuration {shown(self.config)} has no {ds_key_long} that could "
                "be removed: expected one of its entries, by a name such as "
                "'zero_optimization.stage'"
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Whether an entry is set, and not to False or 0."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether an entry is set, and to False or 0."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether an entry is to be filled in."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def is_zero2(self) -> bool:
        """Whether gradients and optimizer states are in parts."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Whether weights are in parts too."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Whether weights or optimizer states are kept on the host or on a disk."""
        devices = (
            self.get_value(f"zero_optimization.offload_{what}.device")
            for what in ("optimizer", "param")
        )
        return any(device in ("cpu", "nvme") for device in devices)

    def reopen(self) -> None:
        """Make "auto" again what :meth:`fill` put in, for another model to be prepared.

        What was changed since stays.
        """
        for key, value in self._filled.items():
            if self.get_value(key) == value:
                self.set_value(key, AUTO)
        self._filled = {}

    def fill(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Put values in the place of "auto", in place; those that are not given are left out.

        Args:
            values: by the entries' names with dots; more than there are entries does no harm.

        Returns:
            a copy of the completed configuration, for DeepSpeed to change as it likes.
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
    """The names of the entries with a value."""
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
