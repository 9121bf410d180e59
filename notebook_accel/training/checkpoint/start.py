"""Where training continues: ``Start``, how checkpoints keep it, and which checkpoint is loaded.

The newest checkpoint that can be read is found in two steps, so that a damaged one is mostly
noticed before anything is loaded from it. First every rank checks the sizes and headers of the
files (:func:`find_damage`); then all ranks load the newest checkpoint that looks complete to all.
A training may go on with other arguments: shapes are compared, and settings given anew win.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn import Module
from torch.optim.lr_scheduler import LRScheduler

from notebook_accel.errors import NotebookAccelError
from notebook_accel.training.checkpoint.folders import NUMBERED, format_in, holds_state, is_ours
from notebook_accel.training.files.atomic import complete_version
from notebook_accel.training.files.formats import entries
from notebook_accel.training.files.state_files import explain, read_state
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer, inner_optimizer
from notebook_accel.training.stepping.scheduler import AcceleratedScheduler

# In the file of a rank's random states, which every checkpoint has: the fields of Start, and beside
# them the seconds since 1970, which prepared loader they speak of, and the steps of each optimizer.
_KEY, _WRITTEN = "training", "written"
# Also in that file: which save it is of.
SAVE_ID = "save_id"


@dataclass(frozen=True, kw_only=True)
class Start:
    """The place at which a training starts or continues, as ``resume_or_start`` returns it."""

    epoch: int = 0
    """The epoch that comes first: ``for epoch in range(start.epoch, num_epochs)``."""
    batch: int = 0
    """Batches of that epoch that this rank has had already; the prepared loader leaves them out."""
    step: int = 0
    """Steps of the optimizer so far."""
    samples: int | None = 0
    """Samples of all ranks so far, over all epochs; None where the loader does not know how many
    a batch or an epoch has."""
    folder: str | None = None
    """The checkpoint that was loaded; None where training begins anew."""


def as_plain(start: Start, loader: int | None, steps: list[int]) -> dict[str, Any]:
    """Return the place in the training as plain values; ``loader`` is None without loaders."""
    known = {name: value for name, value in asdict(start).items() if name != "folder"}
    return {_KEY: {**known, "loader": loader, "steps": steps, _WRITTEN: time.time()}}


def has_save_id(folder: Path, save_id: str) -> bool:
    """Return whether a checkpoint has a file of random states from the save with this ID."""
    with suppress(NotebookAccelError, OSError):
        for path in complete_version(folder).glob("random_states_*.pkl"):
            if path.stat().st_size and read_state(path).get(SAVE_ID) == save_id:
                return True
    return False


def read_progress(states: Mapping[str, Any] | None) -> tuple[Start, int | None, list[int]]:
    """Return what :func:`as_plain` was given; another library's file gives the start."""
    found: dict[str, Any] = (states or {}).get(_KEY, {})
    known = {field.name: found[field.name] for field in fields(Start) if field.name in found}
    return Start(**known), found.get("loader"), found.get("steps", [])


def random_states_file(rank: int) -> str:
    """Return the name of the file with a rank's random states."""
    return f"random_states_{rank}.pkl"


def read_random_states(
    folder: Path, rank: int, options: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Read the file with a rank's random states; None if the checkpoint has none for that rank.

    An empty file counts as none: the rank came to a save of rank 0, and did not get to write.

    Raises:
        NotebookAccelError: the file is broken, or holds something else.
    """
    path = complete_version(folder) / random_states_file(rank)
    if not path.exists() or (rank and path.stat().st_size == 0):
        return None
    found = read_state(path, options)
    if not isinstance(found, dict) or not isinstance(found.get(_KEY, {}), dict):
        raise NotebookAccelError(f"{path} holds no random states: load another checkpoint")
    return found


def candidates(folder: Path) -> list[Path]:
    """Return all checkpoints that ``resume_or_start`` may load from ``folder``, newest first.

    They are ``folder`` itself, folders in it, and folders in ``folder/checkpoints``. Newest means
    last written. Among numbered checkpoints side by side, a higher number is newer, whatever the
    clocks of their writers said.
    """
    found: list[tuple[float, int, Path]] = []
    for parent in (folder, folder / "checkpoints"):
        newest = 0.0
        names = {name: NUMBERED.fullmatch(name) for name in entries(parent)}
        numbers = {name: int(match[1]) if match else -1 for name, match in names.items()}
        for name, number in sorted(numbers.items(), key=lambda item: item[1]):
            path = parent / name
            if _is_checkpoint(path):
                written = _time_of(path)
                if number >= 0:
                    newest = written = max(newest, written)
                found.append((written, number, path))
    if _is_checkpoint(folder):
        found.append((_time_of(folder), -1, folder))
    return [path for *_, path in sorted(found, reverse=True)]


def _is_checkpoint(path: Path) -> bool:
    # One that is being written, or was when its writer died, begins with a dot.
    return not path.name.startswith(".") and holds_state(entries(complete_version(path)))


def _time_of(path: Path) -> float:
    with suppress(NotebookAccelError, OSError):  # loading it says so, later
        found = (read_random_states(path, 0) or {}).get(_KEY, {}).get(_WRITTEN)
        if isinstance(found, float):
            return found
    return path.stat().st_mtime


def find_damage(folder: Path) -> str | None:
    """Return a text on what is wrong with a checkpoint's files, or None if they look complete.

    It reads only sizes and headers, so that it is quick. It finds files that are cut off or empty.
    It does not find wrong bytes in the middle of a weight, nor that a part of sharded weights is
    cut off; loading finds the latter.

    Raises:
        PermissionError: this user may not read the checkpoint.
    """
    path = whole = complete_version(folder)
    try:
        for path in sorted(whole.rglob("*")):
            if not path.is_dir() and is_ours(path.relative_to(whole).parts[0]):
                _look_at(path)
        format_in(whole)().check(whole)
    except (PermissionError, MemoryError):
        raise  # that says nothing of the files
    except NotebookAccelError as error:  # which names its file
        return str(error)
    except Exception as error:  # whatever the readers of three formats raise
        return explain(path, error)
    return None


def _look_at(path: Path) -> None:
    """Read a file's header or table of contents, to find out whether the file is cut off.

    Raises:
        NotebookAccelError: its rank did not get to write it.
        OSError, SafetensorError, ValueError, zipfile.BadZipFile: the file is broken.
    """
    if path.name.startswith("random_states_") and path.stat().st_size == 0:
        raise NotebookAccelError(f"a rank ended before it had written its {path.name}")
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt"):
            pass
    elif path.suffix in (".bin", ".pkl", ".pt"):
        zipfile.ZipFile(path).close()


_MAX_NAMED = 3


def check_shapes(models: Sequence[Module], folder: Path) -> None:
    """Raise RuntimeError if a weight has another shape in a checkpoint; only headers are read."""
    wrong, kind = [], format_in(folder)()
    for index, model in enumerate(models):
        saved = kind.shapes(folder, index)
        for name, value in model.state_dict(keep_vars=True).items():
            # One that is made by the first forward has no shape yet, and ZeRO's have none here.
            if not torch.is_tensor(value) or torch.nn.parameter.is_lazy(value) or not value.dim():
                continue
            shape = tuple(value.shape)
            if value.numel() and saved.get(name, shape) != shape:
                wrong.append(f"size mismatch for {name}: {saved[name]} there, {shape} in the model")
    if wrong:
        more = f"; and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise RuntimeError(
            f"{folder} does not fit the model, and nothing was loaded. "
            f"{'; '.join(wrong[:_MAX_NAMED])}{more}"
        )


def _schedulers_within(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield a scheduler, and those that it runs in turns or together."""
    yield scheduler
    for held in vars(scheduler).values():
        for inner in held if isinstance(held, (list, tuple)) else ():
            if isinstance(inner, LRScheduler):
                yield from _schedulers_within(inner)


def give_new_settings(
    optimizers: Sequence[AcceleratedOptimizer],
    schedulers: Sequence[AcceleratedScheduler],
    made: Sequence[list[dict[str, Any]]],
    before: Sequence[list[dict[str, Any]]],
) -> None:
    """Give loaded optimizers the settings that the function now makes otherwise than before.

    A rate is scaled by new over old, and so are those of its schedules, which keep their place.

    Args:
        made, before: ``settings_of`` each optimizer as it is made now, and as it was made.
    """
    for known, now, old in zip(optimizers, made, before, strict=False):
        own = [
            one
            for each in schedulers
            for one in _schedulers_within(each.scheduler)
            if inner_optimizer(one.optimizer) is known.optimizer
        ]
        for index, (group, new, was) in enumerate(zip(known.param_groups, now, old, strict=False)):
            changed = {k: v for k, v in new.items() if k in was and v != was[k]}
            rate = changed.pop("lr", None)
            group.update(changed)
            if rate is None:
                continue
            factor = rate / was["lr"] if was["lr"] else 1.0
            group["lr"] = rate if group["lr"] == was["lr"] else group["lr"] * factor
            if "initial_lr" in group:
                group["initial_lr"] = rate
            for scheduler in own:
                if index < len(getattr(scheduler, "base_lrs", ())):
                    scheduler.base_lrs[index] = rate
