"""Checkpoints: a folder that is complete or not there, with one file for each thing prepared."""

from __future__ import annotations

import re
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from notebook_accel.errors import ConfigError
from notebook_accel.training.checkpoint.atomic import publish_folder, staging_folder, sweep
from notebook_accel.training.checkpoint.random_states import get_random_states, set_random_states
from notebook_accel.training.checkpoint.weights import (
    load_weights,
    numbered,
    save_weights,
    with_ties,
)
from notebook_accel.training.collectives import broadcast_object_list
from notebook_accel.training.models import uncompiled
from notebook_accel.training.notices import notice_once

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from torch.nn import Module

    from notebook_accel.training.prepare import Preparation
    from notebook_accel.training.settings import ProjectConfiguration

__all__ = ["Checkpoints"]

_OURS = re.compile(
    r"(model|pytorch_model|optimizer|scheduler)(_\d+)?\.(safetensors|bin)|scaler\.pt"
    r"|(random_states|custom_checkpoint)_\d+\.pkl"
)
_NUMBERED = re.compile(r"checkpoint_(\d+)")


class Checkpoints:
    """Writes and reads the checkpoints of one ``Accelerator``.

    Attributes:
        custom: objects that ``register_for_checkpointing`` added.
        save_hooks, load_hooks: called before weights are written or read.
    """

    def __init__(self, preparation: Preparation, project: ProjectConfiguration) -> None:
        self.custom: list[Any] = []
        self.save_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._prepared = preparation
        self._plan = preparation.plan
        self._project = project

    def register(self, objects: Sequence[Any]) -> None:
        """Keep these objects' states in checkpoints too.

        Raises:
            ConfigError: one has no ``state_dict`` or no ``load_state_dict``.
        """
        unfit = [
            type(item).__name__
            for item in objects
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        ]
        if unfit:
            raise ConfigError(
                f"register_for_checkpointing() got {', '.join(unfit)}: each object needs the "
                "methods state_dict and load_state_dict"
            )
        self.custom.extend(objects)

    def add_save_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, folder)`` on every rank before weights are written."""
        return _add_hook(self.save_hooks, hook)

    def add_load_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, folder)`` on every rank before weights are read."""
        return _add_hook(self.load_hooks, hook)

    def save(self, output_dir: str | os.PathLike[str] | None, *, safe: bool) -> str:
        """Write a checkpoint; all ranks call it, and it is whole when it returns."""
        final, staged = self._agree_on_folders(output_dir)
        weights = self._collect_weights()
        writes_folder = self._make_folder(staged)
        try:
            self._run_save_hooks(weights, staged)
            self._write(staged, weights, safe=safe)
            self._plan.strategy.barrier()
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        if writes_folder:
            publish_folder(staged, final, is_ours=_is_ours)
        if output_dir is None:
            self._number_next(final)
        self._plan.strategy.barrier()
        return str(final)

    def load(
        self,
        input_dir: str | os.PathLike[str] | None,
        *,
        load_kwargs: dict[str, Any] | None = None,
        strict: bool = True,
    ) -> None:
        """Read a checkpoint into everything that was prepared or registered.

        Raises:
            FileNotFoundError: there is no such checkpoint, or something prepared is not in it.
        """
        folder = self._newest() if input_dir is None else Path(input_dir)
        if not any(_is_ours(name) for name in _entries(folder)) and not self.load_hooks:
            raise FileNotFoundError(f"there is no checkpoint in {_describe(folder)}")
        models = [known.inner for known in self._prepared.models]
        for hook in tuple(self.load_hooks.values()):
            hook(models, str(folder))
        self._load_models(folder, models, strict=strict)
        options = {"map_location": "cpu", "weights_only": True, **(load_kwargs or {})}
        for name, item in self._stateful():
            item.load_state_dict(_read(folder / name, options))
        self._load_scaler(folder, options)
        self._load_random_states(folder)
        found = _NUMBERED.fullmatch(folder.name)
        if found and input_dir is None:
            self._project.iteration = int(found[1]) + 1

    def _agree_on_folders(self, output_dir: Any) -> tuple[Path, Path]:
        """Where the checkpoint is to be and where it is written, as rank 0 says."""
        said: list[Any] = [None, None]
        if self._plan.topology.process_index == 0:
            final = self._target(output_dir)
            sweep(final)
            said = [str(final), str(staging_folder(final))]
        final_text, staged_text = broadcast_object_list(said)
        return Path(final_text), Path(staged_text)

    def _target(self, output_dir: str | os.PathLike[str] | None) -> Path:
        if output_dir is not None:
            return Path(output_dir).expanduser().resolve()
        numbers = [number for number, _ in self._numbered()]
        number = max([self._project.iteration, *(taken + 1 for taken in numbers)])
        return self._numbered_folder().resolve() / f"checkpoint_{number}"

    def _numbered_folder(self) -> Path:
        project = self._project
        if not project.automatic_checkpoint_naming or project.project_dir is None:
            raise ConfigError(
                "no folder was given: pass one, or make the Accelerator with "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        return Path(project.project_dir) / "checkpoints"

    def _numbered(self) -> list[tuple[int, Path]]:
        """The numbered checkpoints that there are, oldest first."""
        folder = self._numbered_folder()
        found = ((_NUMBERED.fullmatch(name), folder / name) for name in _entries(folder))
        return sorted((int(match[1]), path) for match, path in found if match)

    def _newest(self) -> Path:
        found = self._numbered()
        if not found:
            raise FileNotFoundError(
                f"there is no checkpoint in {_describe(self._numbered_folder())}"
            )
        return found[-1][1]

    def _number_next(self, written: Path) -> None:
        match = _NUMBERED.fullmatch(written.name)
        assert match, "without a folder from the user the name is a numbered one"
        self._project.iteration = int(match[1]) + 1
        limit = self._project.total_limit
        if limit is not None and self._plan.topology.process_index == 0:
            for _, folder in self._numbered()[:-limit]:
                shutil.rmtree(folder, ignore_errors=True)

    def _make_folder(self, staged: Path) -> bool:
        """Make the folder on every disk; whether this rank made it."""
        place = self._plan.topology
        if place.process_index == 0:
            staged.mkdir(parents=True)
        self._plan.strategy.barrier()
        # A machine that does not see rank 0's folder has a disk of its own.
        makes_own = place.local_process_index == 0 and not staged.exists()
        if makes_own:
            staged.mkdir(parents=True)
        self._plan.strategy.barrier()
        return place.process_index == 0 or makes_own

    def _collect_weights(self) -> list[dict[str, Any]]:
        state_dict = self._plan.strategy.state_dict
        return [state_dict(uncompiled(known.inner), full=True) for known in self._prepared.models]

    def _run_save_hooks(self, weights: list[dict[str, Any]], staged: Path) -> None:
        models = [known.inner for known in self._prepared.models]
        for hook in tuple(self.save_hooks.values()):
            hook(models, weights, str(staged))

    def _write(self, folder: Path, weights: list[dict[str, Any]], *, safe: bool) -> None:
        place = self._plan.topology
        each_machine = self._project.save_on_each_node and place.local_process_index == 0
        if place.process_index == 0 or each_machine:
            for index, state in enumerate(weights):
                save_weights(state, folder, index, safe=safe)
            for name, item in self._stateful():
                torch.save(item.state_dict(), folder / name)
            if self._plan.strategy.scaling is not None:
                torch.save(self._plan.strategy.scaling.scaler.state_dict(), folder / "scaler.pt")
        states = get_random_states(place.device)
        states["step"] = self._plan.accumulation.step
        torch.save(states, folder / f"random_states_{place.process_index}.pkl")

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        """The files of everything that has a ``state_dict``, models aside."""
        for index, optimizer in enumerate(self._prepared.optimizers):
            yield numbered("optimizer", index, ".bin"), optimizer
        for index, scheduler in enumerate(self._prepared.schedulers):
            yield numbered("scheduler", index, ".bin"), scheduler
        for index, item in enumerate(self.custom):
            yield f"custom_checkpoint_{index}.pkl", item

    def _load_models(self, folder: Path, models: list[Module], *, strict: bool) -> None:
        for index, model in enumerate(map(uncompiled, models)):
            state = load_weights(folder, index)
            if state is None:
                raise FileNotFoundError(
                    f"{numbered('model', index, '.safetensors')} is not in {_describe(folder)}"
                )
            self._plan.strategy.load_state_dict(model, with_ties(state, model), strict=strict)

    def _load_scaler(self, folder: Path, options: dict[str, Any]) -> None:
        scaling = self._plan.strategy.scaling
        if scaling is None:
            return
        if (folder / "scaler.pt").exists():
            scaling.scaler.load_state_dict(_read(folder / "scaler.pt", options))
        else:
            notice_once("no scaler", f"{folder} has no loss scale: it begins anew")

    def _load_random_states(self, folder: Path) -> None:
        place = self._plan.topology
        path = folder / f"random_states_{place.process_index}.pkl"
        if not path.exists():
            notice_once(
                "no random states",
                f"{folder} has no random states for rank {place.process_index}: it was written "
                "by fewer ranks; they stay as they are",
            )
            return
        states = _read(path, {"map_location": "cpu", "weights_only": True})
        self._plan.accumulation.step = states.get("step", 0)
        set_random_states(states, place.device)


def _add_hook(
    hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]
) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _is_ours(name: str) -> bool:
    return _OURS.fullmatch(name) is not None


def _entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _describe(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}, which is {'a file' if folder.exists() else 'not there'}"
    return f"{folder}; it holds: {', '.join(_entries(folder)) or 'nothing'}"


def _read(path: Path, options: dict[str, Any]) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"{path.name} is not in {_describe(path.parent)}")
    with torch.serialization.safe_globals(_numpy_types()):
        return torch.load(path, **options)


def _numpy_types() -> list[Any]:
    """What arrays and numbers of numpy need to be read without trusting the file."""
    core = cast("Any", getattr(np, "_core", None) or np.core)
    kinds = {type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "u4", "u8", "?")}
    names = [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype]
    return [*names, *kinds]
