"""Weights from a checkpoint's files into a model, each straight to where the device map wants it.

One tensor is in memory at a time: safetensors and torch files are mapped, not read. What stays on
the host is copied out of a mapped file: the next save may write there, and a process that touches
what is no longer in a mapped file is killed. A name that a checkpoint lacks because it is tied to
another gets that one's value.
"""

from __future__ import annotations

import json
import logging
import zipfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Union

import torch
from safetensors import SafetensorError, safe_open

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.training.big_modeling.device_map import device_of, is_in_any
from notebook_accel.training.big_modeling.dispatch import dispatch_model
from notebook_accel.training.big_modeling.dtypes import as_dtype
from notebook_accel.training.big_modeling.inference import infer_auto_device_map
from notebook_accel.training.big_modeling.memory_limits import get_balanced_memory
from notebook_accel.training.big_modeling.offload_store import (
    OffloadedWeightsLoader,
    load_offloaded_weight,
    offload_weight,
    save_offload_index,
)
from notebook_accel.training.big_modeling.tensors import as_device, set_module_tensor_to_device
from notebook_accel.training.checkpoint.atomic import complete_version
from notebook_accel.training.checkpoint.state_files import check_regular, explain, read_state
from notebook_accel.training.collectives import this_rank
from notebook_accel.training.ties import find_tied_parameters, retie_parameters

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from torch.nn import Module

    from notebook_accel.training.big_modeling.dtypes import AnyDtype
    from notebook_accel.training.big_modeling.memory_limits import MaxMemory
    from notebook_accel.training.big_modeling.tensors import AnyDevice

__all__ = [
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
]

Folder = Union[str, "os.PathLike[str]"]
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_log = logging.getLogger(__name__)


def load_state_dict(
    checkpoint_file: Folder, device_map: Mapping[str, AnyDevice] | None = None
) -> dict[str, torch.Tensor]:
    """Read the tensors of one file.

    Args:
        checkpoint_file: safetensors, or what ``torch.save`` wrote.
        device_map: where each shall be, "disk" meaning the host; None leaves them on the host.
    """
    file = Path(checkpoint_file)
    if device_map is None:
        return dict(_tensors(file, is_mapped=False))
    state: dict[str, torch.Tensor] = {}
    for name, value in _tensors(file):
        device = device_of(name, device_map)
        state[name] = value.to("cpu" if device == "disk" else device, copy=True)
    return state


def load_checkpoint_in_model(
    model: Module,
    checkpoint: Folder,
    device_map: Mapping[str, AnyDevice] | None = None,
    offload_folder: Folder | None = None,
    dtype: AnyDtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, which may be without weights yet (on the meta device).

    Args:
        model: is changed.
        checkpoint: a file with all weights, an index of several, or a folder with one of them.
        device_map: where the weights go, by name of module; None keeps them where they are.
        offload_folder: gets the files of what goes to "disk".
        dtype: the type that they shall have; None keeps the model's.
        offload_state_dict: keep what goes to the host in temporary files until all is read, where
            memory does not suffice for a file and the weights at once.
        offload_buffers: put buffers on "disk" too.
        keep_in_fp32_modules: names of modules whose weights stay float32, whatever ``dtype`` says.
        offload_8bit_bnb: what goes to "disk" is quantised first by ``load_and_quantize_model``.
        strict: refuse a checkpoint that lacks weights or has others than the model's.
        full_state_dict: for a model that is sharded over ranks: the files hold whole weights.
        broadcast_from_rank0: for such a model: rank 0 alone reads, and sends.

    Raises:
        ConfigError: there is no such checkpoint, it does not fit, or something goes to "disk" and
            there is no folder for it.
        NotebookAccelError: a file of it is broken.
    """
    on_disk = [name for name, device in (device_map or {}).items() if device == "disk"]
    if on_disk and offload_folder is None:
        raise ConfigError(
            f"the device map puts {on_disk} on disk: pass the folder for it as offload_folder"
        )
    files = _checkpoint_files(Path(checkpoint))
    if any(hasattr(weight, "device_mesh") for weight in model.parameters()):
        # Imported here: it takes seconds, which a model that is not sharded over ranks is spared.
        import torch.distributed.checkpoint.state_dict as dist_state

        reads = not broadcast_from_rank0 or this_rank() == 0
        divided = {
            name
            for name, weight in model.state_dict().items()
            if any(placement.is_shard() for placement in getattr(weight, "placements", ()))
        }
        state: dict[str, Any] = {
            name: value if name in divided else value.clone()
            for file in files
            if reads
            for name, value in _tensors(file)
        }
        options = dist_state.StateDictOptions(
            full_state_dict=full_state_dict,
            broadcast_from_rank0=broadcast_from_rank0,
            strict=strict,
        )
        dist_state.set_model_state_dict(model, state, options=options)
        return
    del offload_8bit_bnb  # ours quantises while it replaces layers, before anything is offloaded
    ties = find_tied_parameters(model)
    with ExitStack() as stack:
        load = _Load(
            model=model,
            device_map=device_map,
            folder=None if offload_folder is None else Path(offload_folder),
            host_folder=(
                Path(stack.enter_context(TemporaryDirectory())) if offload_state_dict else None
            ),
            dtype=None if dtype is None else as_dtype(dtype),
            keep_in_fp32=tuple(keep_in_fp32_modules or ()),
            offload_buffers=offload_buffers,
        )
        load.run(files, ties, strict=strict)
    retie_parameters(model, ties)


@dataclass(kw_only=True)
class _Load:
    """One checkpoint on its way into one model."""

    model: Module
    device_map: Mapping[str, AnyDevice] | None
    folder: Path | None
    host_folder: Path | None
    """Temporary files for what goes to the host; None puts it there at once."""
    dtype: Any
    keep_in_fp32: tuple[str, ...]
    offload_buffers: bool
    disk_index: dict[str, Any] = field(default_factory=dict)
    host_index: dict[str, Any] = field(default_factory=dict)

    def run(self, files: Sequence[Path], ties: Sequence[Sequence[str]], *, strict: bool) -> None:
        """Load all files, and say what did not fit."""
        own = set(self.model.state_dict())
        names = [name for file in files for name in _names(file)]
        aliases = _aliases(ties, set(names))
        unexpected = [name for name in names if name not in own]
        missing = own - set(names) - {alias for group in aliases.values() for alias in group}
        if strict and (missing or unexpected):
            raise ConfigError(
                f"the checkpoint does not fit {type(self.model).__name__}: it lacks "
                f"{sorted(missing)} and has {unexpected} beside. Pass strict=False to load the rest"
            )
        if unexpected:
            _log.warning(
                "%s has no such weights, which the checkpoint holds: %s",
                type(self.model).__name__,
                unexpected,
            )
        for file in files:
            for name, value in _tensors(file):
                for each in (name, *aliases.get(name, ())) if name in own else ():
                    self._put(each, value)
        self._finish()

    def _put(self, name: str, value: torch.Tensor) -> None:
        device = self._device(name)
        dtype = torch.float32 if is_in_any(name, self.keep_in_fp32) else self.dtype
        folder = {"disk": self.folder, "cpu": self.host_folder}.get(str(device))
        if folder is None:
            if as_device(device).type == "cpu":
                value = value.clone()
            set_module_tensor_to_device(self.model, name, device, value, dtype)
            return
        folder.mkdir(parents=True, exist_ok=True)
        index = self.disk_index if device == "disk" else self.host_index
        if value.is_floating_point():
            value = value.to(dtype or _tensor(self.model, name).dtype)
        set_module_tensor_to_device(self.model, name, "meta", dtype=value.dtype)
        offload_weight(value, name, folder, index)

    def _device(self, name: str) -> Any:
        """Where a weight goes; a buffer does not go to disk unless it is asked for."""
        if self.device_map is None:
            device = _tensor(self.model, name).device
            return torch.device("cpu") if device.type == "meta" else device
        device = device_of(name, self.device_map)
        is_buffer = name in dict(self.model.named_buffers())
        return "cpu" if device == "disk" and is_buffer and not self.offload_buffers else device

    def _finish(self) -> None:
        if self.folder is not None:
            save_offload_index(self.disk_index, self.folder)
        if self.host_index:
            weights = OffloadedWeightsLoader(save_folder=self.host_folder, index=self.host_index)
            for name, value in weights.items():
                # A copy: the file under the mapped tensor goes away.
                set_module_tensor_to_device(self.model, name, "cpu", value.clone())


def _tensor(model: Module, name: str) -> torch.Tensor:
    owner, _, own_name = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(owner), own_name)
    return tensor


def _aliases(ties: Sequence[Sequence[str]], names: set[str]) -> dict[str, list[str]]:
    """The names that a checkpoint lacks, under the tied one that it has."""
    found: dict[str, list[str]] = {}
    for group in ties:
        present = next((name for name in group if name in names), None)
        if present is not None:
            found[present] = [name for name in group if name not in names]
    return found


def _names(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        with _opened(file) as opened:
            return list(opened.keys())
    return list(_unpickled(file))


def _tensors(file: Path, *, is_mapped: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    if file.suffix != ".safetensors":
        yield from _unpickled(file, is_mapped=is_mapped).items()
        return
    with _opened(file) as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            tensor: torch.Tensor = opened.get_tensor(name)
            yield name, tensor if is_mapped else tensor.clone()


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A file of safetensors.

    Raises:
        NotebookAccelError: it is broken.
    """
    check_regular(file)
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise NotebookAccelError(explain(file, error)) from error


def _unpickled(file: Path, *, is_mapped: bool = True) -> dict[str, torch.Tensor]:
    check_regular(file)
    # What torch wrote before it wrote archives cannot be mapped.
    options = {"mmap": True} if is_mapped and zipfile.is_zipfile(file) else {}
    state: dict[str, torch.Tensor] = read_state(file, options)
    return state


def _checkpoint_files(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint, given as a file, an index, or a folder with one of the two."""
    if checkpoint.is_dir():
        checkpoint = complete_version(checkpoint)
        whole = [checkpoint / name for name in _WHOLE if (checkpoint / name).is_file()]
        found = whole[:1] or sorted(checkpoint.glob("*.index.json"))
        if len(found) != 1:
            raise ConfigError(
                f"{checkpoint} has {len(found)} files that end in .index.json: expected one, or "
                f"{' or '.join(_WHOLE)}"
            )
        checkpoint = found[0]
    if not checkpoint.is_file():
        raise ConfigError(
            f"there is no checkpoint at {checkpoint}: expected a file with all weights, an index "
            "of several, or a folder with one of them"
        )
    return _files_of_index(checkpoint) if checkpoint.suffix == ".json" else [checkpoint]


def _files_of_index(path: Path) -> list[Path]:
    """The files that an index names, beside it or below.

    Raises:
        NotebookAccelError: it is broken.
        ConfigError: it names what lies elsewhere.
    """
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        names = [Path(name) for name in sorted(set(index.get("weight_map", index).values()))]
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise NotebookAccelError(explain(path, error)) from error
    for name in names:
        if name.is_absolute() or ".." in name.parts:
            raise ConfigError(
                f"{path} names the file {str(name)!r}, which lies outside of its folder: expected "
                "the names of files beside it"
            )
    return [path.parent / name for name in names]


def load_checkpoint_and_dispatch(
    model: Module,
    checkpoint: Folder,
    device_map: str | Mapping[str, AnyDevice] | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    offload_folder: Folder | None = None,
    offload_buffers: bool = False,
    dtype: AnyDtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Module:
    """Load a checkpoint into a model, spread over devices, host and disk.

    Args:
        model: usually made under ``init_empty_weights``; is changed, and returned.
        checkpoint: as of :func:`load_checkpoint_in_model`.
        device_map: device by name of module; "auto" or "balanced" fills accelerators evenly,
            "balanced_low_0" leaves room on the first, "sequential" fills one after the other;
            None only loads.
        max_memory: what each device may hold, for a map that is inferred; as of
            :func:`infer_auto_device_map`.
        no_split_module_classes: names of classes that must stay on one device, for such a map.
        offload_folder: gets the files of what goes to "disk".
        offload_buffers: offload buffers too.
        dtype: the type that the weights shall have; None keeps the model's.
        offload_state_dict: as of :func:`load_checkpoint_in_model`; None does it where something
            goes to disk.
        skip_keys, preload_module_classes, force_hooks: as of ``dispatch_model``.
        strict, full_state_dict, broadcast_from_rank0: as of :func:`load_checkpoint_in_model`.

    Raises:
        ConfigError: the checkpoint or the map makes no sense.
    """
    if isinstance(device_map, str):
        if device_map not in _STRATEGIES:
            raise ConfigError(
                f"device_map={device_map!r}: expected a mapping, or one of {', '.join(_STRATEGIES)}"
            )
        if device_map != "sequential":
            max_memory = get_balanced_memory(
                model,
                max_memory,
                no_split_module_classes,
                dtype,
                low_zero=device_map == "balanced_low_0",
            )
        device_map = infer_auto_device_map(
            model,
            max_memory,
            no_split_module_classes,
            dtype,
            offload_buffers=offload_buffers,
        )
    if offload_state_dict is None:
        offload_state_dict = "disk" in (device_map or {}).values()
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map,
        offload_folder,
        dtype,
        offload_state_dict,
        offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def load_offloaded_weights(
    model: Module, index: Mapping[str, Any] | None, offload_folder: Folder
) -> None:
    """Put tensors of an offload store into a model, on the host.

    Args:
        model: on any device, meta too.
        index: the entries of the store that are read, by the names of the weights; nothing is
            read where there are none.
        offload_folder: has a file a tensor.
    """
    for name, entry in (index or {}).items():
        value = load_offloaded_weight(Path(offload_folder, f"{name}.dat"), entry)
        set_module_tensor_to_device(model, name, "cpu", value)
