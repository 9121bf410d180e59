"""``infer_auto_device_map``: which module goes to which device.

Modules are taken in the model's order and devices in the order of their limits. A module that fits
goes to the current device; one that does not is replaced by its parts; one that cannot be split
closes the device, and the next one is tried. Nothing goes back to a closed device, so that a
forward visits the devices in order. Weights with several names go together.

The first accelerator and the host each keep room for the largest layer that is still to come: it is
there that offloaded layers are brought when their forward runs.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

import torch

from notebook_accel.training.big_modeling.device_map import clean_device_map, is_below
from notebook_accel.training.big_modeling.memory_limits import Limits, MaxMemory, get_max_memory
from notebook_accel.training.big_modeling.sizes import (
    compute_module_sizes,
    direct_parts,
    get_max_layer_size,
    is_whole,
)
from notebook_accel.training.ties import find_tied_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn import Module

    from notebook_accel.training.big_modeling.dtypes import AnyDtype

__all__ = ["infer_auto_device_map"]

NamedPart = tuple[str, Union[torch.nn.Module, torch.Tensor]]

_log = logging.getLogger(__name__)


def infer_auto_device_map(
    model: Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Spread a model over devices, filling one after the other.

    Args:
        model: on any device, meta included.
        max_memory: what each device may hold: bytes, or a text such as "2GB", by the index of an
            accelerator, "cpu" or "disk"; None takes what is free.
        no_split_module_classes: names of classes that must stay on one device (those with a
            residual connection inside).
        dtype: what the weights will be loaded in.
        special_dtypes: the type of single tensors, by name.
        verbose: log each decision.
        clean_result: join entries of modules that are on one device as a whole.
        offload_buffers: buffers of offloaded modules are offloaded too, and need no room on the
            device that computes.
        fallback_allocation: where a device would stay empty, search for a smaller module that
            fits there.

    Returns:
        device by name of module or tensor; "disk" for what fits nowhere else.

    Raises:
        ConfigError: a key of ``max_memory`` is no device, or a text in it no size.
    """
    limits = get_max_memory(max_memory)
    classes = no_split_module_classes
    search = _MapSearch(
        limits=limits,
        devices=[*limits, *(() if "disk" in limits else ("disk",))],
        sizes=compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes),
        no_split=[classes] if isinstance(classes, str) else list(classes or ()),
        ties=find_tied_parameters(model),
        waiting=direct_parts(model),
        fallback=fallback_allocation,
        verbose=verbose,
    )
    search.run()
    search.say_what_is_empty()
    if not offload_buffers:
        buffers = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
        _warn_of_buffers(search, buffers)
    return clean_device_map(search.device_map) if clean_result else search.device_map


@dataclass(kw_only=True)
class _MapSearch:
    """The state of one search: the parts still to place, and how full the devices are."""

    limits: Limits
    devices: list[int | str]
    sizes: Mapping[str, int]
    no_split: list[str]
    ties: list[list[str]]
    waiting: list[NamedPart]
    fallback: bool
    verbose: bool
    device_map: dict[str, int | str] = field(default_factory=dict)
    used: dict[int | str, int] = field(default_factory=dict)
    needed: dict[int | str, int] = field(default_factory=dict)
    """The limit from which a device that stayed empty would have been used."""
    current: int = 0
    largest: int = 0
    largest_names: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Place every part."""
        self._measure_largest(self.waiting)
        while self.waiting:
            name, part = self.waiting[0]
            self._forget_largest(name)
            tied = self._tied_with(name)
            size = self.sizes.get(name, 0)
            together = self._size_with(size, tied)
            if self._fits(together):
                self._place([name, *(other for other, _ in tied)], together)
            elif self._fits(size) and self._split_one_of(tied):
                continue
            # A module that would leave no byte is split too: its tied parts do not fit beside it.
            elif not self._fits(size + 1) and not is_whole(part, self.no_split):
                self._split(0)
            elif not self._let_smaller_go_first(together):
                self._close_device(together)

    @property
    def device(self) -> int | str:
        """The device that is being filled."""
        return self.devices[self.current]

    def room(self) -> int | None:
        """The bytes that are left on the current device; None for no limit."""
        limit = self.limits.get(self.device)
        if limit is None or self.device == "disk":
            return None
        return limit - self._reserved() - self.used.get(self.device, 0)

    def main_devices(self) -> list[int | str]:
        """The devices that bring offloaded layers in."""
        if "mps" in self.devices:
            return ["mps"]
        first = next((device for device in self.devices if isinstance(device, int)), None)
        return ["cpu"] if first is None else [first, "cpu"]

    def say_what_is_empty(self) -> None:
        """Log which devices have nothing, and what their limits would have to be."""
        empty = [device for device in self.needed if not self.used.get(device, 0)]
        if empty:
            wanted = ", ".join(f"{device}: {self.needed[device]} bytes" for device in empty)
            _log.warning(
                "device_map: nothing fits on %s within max_memory; the least that would let the "
                "next module in is %s",
                empty,
                wanted,
            )

    def _fits(self, size: int) -> bool:
        room = self.room()
        return room is None or size <= room

    def _reserved(self) -> int:
        return self.largest if self.device in self.main_devices() else 0

    def _measure_largest(self, waiting: Sequence[NamedPart]) -> None:
        modules = [part for part in waiting if isinstance(part[1], torch.nn.Module)]
        self.largest, self.largest_names = get_max_layer_size(modules, self.sizes, self.no_split)

    def _forget_largest(self, name: str) -> None:
        """Measure what is behind the front part once the last of the largest layers is in it."""
        self.largest_names = [layer for layer in self.largest_names if not is_below(layer, name)]
        if not self.largest_names:
            self._measure_largest(self.waiting[1:])

    def _tied_with(self, name: str) -> list[NamedPart]:
        """The other waiting parts that share a weight with ``name``."""
        names = {
            other
            for group in self.ties
            if any(is_below(one, name) for one in group)
            for other in group
            if not is_below(other, name)
        }
        return [
            part
            for part in self.waiting
            if part[0] != name and any(is_below(one, part[0]) for one in names)
        ]

    def _size_with(self, size: int, tied: Sequence[NamedPart]) -> int:
        """Bytes of a part and its tied ones; a shared weight is counted under one name alone."""
        return size + sum(self.sizes.get(name, 0) for name, _ in tied)

    def _place(self, names: Sequence[str], size: int) -> None:
        self.used[self.device] = self.used.get(self.device, 0) + size
        for name in names:
            self.device_map[name] = self.device
            self._say("%s goes to %s", name, self.device)
        self.waiting = [part for part in self.waiting if part[0] not in names]

    def _split_one_of(self, tied: Sequence[NamedPart]) -> bool:
        """Split the first of the tied parts that may be; whether there was one."""
        for name, part in tied:
            if not is_whole(part, self.no_split):
                self._split([other for other, _ in self.waiting].index(name))
                return True
        return False

    def _split(self, index: int) -> None:
        """Put the parts of a waiting module where it stood."""
        name, part = self.waiting[index]
        assert isinstance(part, torch.nn.Module), "a tensor has no parts"
        self._say("%s is split: %s has not room for all of it", name, self.device)
        self.waiting[index : index + 1] = direct_parts(part, name)
        self._measure_largest(self.waiting)

    def _let_smaller_go_first(self, size: int) -> bool:
        """With fallback allocation, put a module in front that fits where nothing has fitted yet.

        Args:
            size: bytes of the front part, which did not fit: room for it is kept, since it is
                brought in here if it ends up on the host.

        Returns:
            whether there was such a module.
        """
        if not self.fallback or self.used.get(self.device, 0) or self.device == "disk":
            return False
        found = self._first_within(self.limits[self.device] - max(self.largest, size))
        if found is None:
            return False
        while found not in (waiting := [name for name, _ in self.waiting]):
            index = next(i for i, name in enumerate(waiting) if is_below(found, name))
            self._split(index)
        self.waiting.insert(0, self.waiting.pop(waiting.index(found)))
        return True

    def _first_within(self, room: int) -> str | None:
        """The name of the first part behind the front one, in any depth, that takes no more."""
        search = self.waiting[1:]
        while search:
            name, part = search.pop(0)
            if self._size_with(self.sizes.get(name, 0), self._tied_with(name)) <= room:
                return name
            if not is_whole(part, self.no_split) and isinstance(part, torch.nn.Module):
                search = [*direct_parts(part, name), *search]
        return None

    def _close_device(self, size: int) -> None:
        if not self.used.get(self.device, 0):
            self.needed[self.device] = size + self._reserved()
        self._say("%s is full", self.device)
        self.current += 1

    def _say(self, text: str, *values: object) -> None:
        if self.verbose:
            _log.warning(text, *values)


def _warn_of_buffers(search: _MapSearch, buffers: Mapping[str, int]) -> None:
    """Warn where the buffers of offloaded modules do not fit on any accelerator."""
    left = [
        limit - search.used.get(device, 0)
        for device, limit in search.limits.items()
        if isinstance(device, int)
    ]
    offloaded = [name for name, device in search.device_map.items() if device in ("cpu", "disk")]
    needed = sum(buffers.get(name, 0) for name in offloaded)
    if left and needed > max(left):
        warnings.warn(
            f"the offloaded modules have {needed} bytes of buffers, which stay on the accelerator "
            f"that computes, and the most room left is {max(left)}: pass offload_buffers=True "
            "here and to dispatch_model if memory does not suffice",
            stacklevel=3,
        )
