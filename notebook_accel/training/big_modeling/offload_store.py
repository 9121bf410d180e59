"""Weights in files, one a tensor: ``NAME.dat`` holds its bytes, ``index.json`` types and shapes.

The files are mapped into memory when they are read, so that what a forward does not touch is never
read. Safetensors files can be part of an index too. The format is Accelerate's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import torch
from safetensors import safe_open

from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    import os

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
]

_INDEX = "index.json"
Folder = Union[str, "os.PathLike[str]"]


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: Folder,
    index: MutableMapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a tensor into a file of a folder.

    Args:
        weight: on any device but meta.
        weight_name: names the file.
        offload_folder: exists.
        index: gets an entry for the tensor.

    Returns:
        the index.

    Raises:
        ConfigError: the name is none of a file in the folder.
    """
    path = _file_of(weight_name, offload_folder)
    index = {} if index is None else index
    weight = weight.detach()
    index[weight_name] = {
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    path.unlink(missing_ok=True)  # who still reads the old file keeps it
    if weight.numel():
        _mapped(path, weight.dtype, weight.shape, write=True).copy_(weight)
    else:
        path.touch()
    return dict(index)


def _file_of(weight_name: str, folder: Folder) -> Path:
    """The file of a tensor, whose name a checkpoint or an index from elsewhere may have given."""
    file = f"{weight_name}.dat"
    if Path(file).name != file:
        raise ConfigError(
            f"the weight {weight_name!r} cannot have a file in {folder}: expected a name without "
            "folders, such as 'layers.0.weight'"
        )
    return Path(folder, file)


def load_offloaded_weight(weight_file: Folder, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Map a tensor that :func:`offload_weight` wrote into memory.

    Args:
        weight_file: its path.
        weight_info: its entry in the index.

    Returns:
        a tensor that may be changed; the file stays as it is.
    """
    dtype, shape = getattr(torch, weight_info["dtype"]), tuple(weight_info["shape"])
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return _mapped(Path(weight_file), dtype, shape, write=False)


def _mapped(path: Path, dtype: torch.dtype, shape: Sequence[int], *, write: bool) -> torch.Tensor:
    size = math.prod(shape)
    return torch.from_file(str(path), shared=write, size=size, dtype=dtype).reshape(shape)


def save_offload_index(index: Mapping[str, Any], offload_folder: Folder) -> None:
    """Add entries to the index of a folder; nothing is written where there are none."""
    if not index:
        return
    path = Path(offload_folder, _INDEX)
    present = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**present, **index}, indent=2))


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all tensors of a state dict into files of a folder, which is made if it is missing."""
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for name, weight in state_dict.items():
        index = offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


class PrefixedDataset(Mapping[str, Any]):
    """The entries of a mapping whose names begin with a prefix; it is left out when asking.

    Iterating gives the whole names. The length is that of the mapping inside.
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.dataset if name.startswith(self.prefix))

    def __len__(self) -> int:
        return len(self.dataset)


class OffloadedWeightsLoader(Mapping[str, Any]):
    """The tensors of a state dict, of a folder of files, and of safetensors files, by name.

    Args:
        state_dict: asked first.
        save_folder: as :func:`offload_state_dict` left it.
        index: entries as in the folder's, or ``{"safetensors_file": path, "weight_name": name,
            "dtype": dtype}``; None reads the folder's.
        device: where tensors of safetensors files are loaded; None is the host.

    Raises:
        ConfigError: there is nothing to load from.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: Folder | None = None,
        index: Mapping[str, Any] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigError(
                "OffloadedWeightsLoader has nothing to load from: pass a state_dict, a "
                "save_folder or an index"
            )
        self.state_dict = dict(state_dict or {})
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = json.loads(Path(save_folder, _INDEX).read_text())
        self.index = dict(index or {})
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self.device = device

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        if entry.get("safetensors_file") is None:
            return load_offloaded_weight(_file_of(key, self.save_folder or ""), entry)
        device: Any = "cpu" if self.device is None else self.device
        if isinstance(device, torch.device):  # safetensors takes texts and numbers alone
            device = str(device)
        with safe_open(entry["safetensors_file"], framework="pt", device=device) as file:
            tensor: torch.Tensor = file.get_tensor(entry.get("weight_name", key))
        return tensor.to(getattr(torch, entry["dtype"])) if "dtype" in entry else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The entries of a state dict that belong to some submodules, with their whole names."""
    return {
        name: value
        for parent in submodule_names
        for name, value in state_dict.items()
        if name == parent or name.startswith(f"{parent}.")
    }
