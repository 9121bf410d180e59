"""The folders of checkpoints, and where training continues: ``Start``.

Numbered checkpoints lie side by side::

    project_dir/checkpoints/     or the folder that ``resume_or_start`` was given
        checkpoint_0/  checkpoint_1/  ...

The newest checkpoint that can be read is found in two steps, so that a damaged one is mostly
noticed before anything is loaded from it. First every rank checks the sizes and headers of the
files (:func:`find_damage`); then all ranks load the newest checkpoint that looks complete to all.
A training may go on with other arguments: shapes are compared, and settings given anew win.
"""

from __future__ import annotations

import os
import re
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn import Module
from torch.optim.lr_scheduler import LRScheduler

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.rank.this_rank import current
from notebook_accel.training.data.loaders import PreparedLoader
from notebook_accel.training.files import Format, entries, numbered
from notebook_accel.training.files.atomic import complete_version
from notebook_accel.training.files.state_files import explain, read_state
from notebook_accel.training.preparing import Preparation
from notebook_accel.training.preparing.state_after_stop import INTERRUPTED
from notebook_accel.training.processes.random_numbers import get_random_states, set_random_states
from notebook_accel.training.settings.handlers import ProjectConfiguration
from notebook_accel.training.settings.notices import notice, notice_once
from notebook_accel.training.stepping.optimizer import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    inner_optimizer,
    settings_of,
)
from notebook_accel.training.strategies.base import sharded
from notebook_accel.training.strategies.deepspeed import DeepSpeedFiles

NUMBERED = re.compile(r"checkpoint_(\d+)")
# The states of objects that the user registered.
CUSTOM = re.compile(r"custom_checkpoint_\d+\.pkl")

# The formats of models and optimizers, by the entries that a checkpoint has of each: the first that
# it has any of is how it is read. It has one weights file a model; the several files and the index
# that save_model writes are the user's export, and stay. "latest" stays too: the next DeepSpeed
# checkpoint replaces it, and users have links of that name.
FORMATS: dict[re.Pattern[str], Callable[..., Format]] = {
    re.compile(r"pytorch_model_fsdp_\d+|optimizer_\d+"): sharded,
    re.compile(r"pytorch_model|zero_to_(fp32|torch)\.py"): DeepSpeedFiles,
    re.compile(r"(model|pytorch_model|optimizer)(_\d+)?\.(safetensors|bin)"): Format,
}
_ENTRIES = re.compile(
    r"(scheduler|loader)(_\d+)?\.bin|scaler\.pt|(random_states|custom_checkpoint)_\d+\.pkl"
)
# What save_model writes, too.
_WEIGHTS = re.compile(r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)")

# In the file of a rank's random states, which every checkpoint has: the fields of Start, and beside
# them the seconds since 1970, which prepared loader they speak of, and the steps of each optimizer.
_KEY, _WRITTEN = "training", "written"
# Also in that file: which save it is of.
SAVE_ID = "save_id"


def is_ours(name: str) -> bool:
    """Return whether an entry of this name in a checkpoint's folder belongs to the checkpoint.

    Other entries are the user's: a new checkpoint at the same path does not remove them.
    """
    return any(pattern.fullmatch(name) for pattern in (*FORMATS, _ENTRIES))


def format_in(folder: Path) -> Callable[..., Format]:
    """Return the class of the format of a checkpoint's models and optimizers."""
    names = entries(folder)
    found = (kind for pattern, kind in FORMATS.items() if any(map(pattern.fullmatch, names)))
    return next(found, Format)


def resolved(folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder, with ``~`` expanded."""
    return Path(folder).expanduser().resolve()


class Numbering:
    """Names, finds and removes numbered checkpoints (``checkpoint_0``, ``checkpoint_1``, ...)."""

    def __init__(self, project: ProjectConfiguration) -> None:
        self.project = project
        self.parent: Path | None = None

    def folder(self) -> Path:
        """Return the folder of the numbered checkpoints."""
        project = self.project
        if self.parent is not None:
            return self.parent
        if not project.automatic_checkpoint_naming or project.project_dir is None:
            raise ConfigError(
                "no folder was given: pass one, or make the Accelerator with "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        return resolved(project.project_dir) / "checkpoints"

    def existing(self) -> list[tuple[int, Path]]:
        """Return (number, folder) of each numbered checkpoint, the oldest first."""
        folder = self.folder()
        found = ((NUMBERED.fullmatch(name), folder / name) for name in entries(folder))
        return sorted((int(match[1]), path) for match, path in found if match)

    def newest(self) -> Path:
        """Return the checkpoint with the highest number, or :meth:`folder` if there is none."""
        found = self.existing()
        return found[-1][1] if found else self.folder()

    def next(self, being_written: Sequence[str] = ()) -> str:
        """Return the name of the next checkpoint, with a number above all existing ones."""
        names = [*entries(self.folder()), *being_written]
        above = [int(match[1]) + 1 for match in map(NUMBERED.fullmatch, names) if match]
        return f"checkpoint_{max([self.project.iteration, *above])}"

    def follow(self, written: Path) -> None:
        """Make the next number higher than that of ``written``, if ``written`` is numbered."""
        match = NUMBERED.fullmatch(written.name)
        if match:  # else rank 0 named a folder, and this rank none
            self.project.iteration = int(match[1]) + 1


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


def has_save_id(folder: Path, save_id: str) -> bool:
    """Return whether a checkpoint has a file of random states from the save with this ID."""
    with suppress(NotebookAccelError, OSError):
        for path in complete_version(folder).glob("random_states_*.pkl"):
            if path.stat().st_size and read_state(path).get(SAVE_ID) == save_id:
                return True
    return False


def is_of_stop(folder: Path, options: dict[str, Any]) -> bool:
    """Return whether a checkpoint is what a stopped run left, and no save."""
    return (read_random_states(folder, 0, options) or {}).get(SAVE_ID, "") is None


def read_progress(states: Mapping[str, Any]) -> tuple[Start, int | None, list[int]]:
    """Return start, loader and steps as they were saved; another library's file gives the start."""
    found: dict[str, Any] = states.get(_KEY, {})
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
    if path.name.startswith("."):
        return False
    # Exported weights alone are none.
    names = entries(complete_version(path))
    return any(is_ours(name) and not _WEIGHTS.fullmatch(name) for name in names)


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
            if path.is_dir() or not is_ours(path.relative_to(whole).parts[0]):
                continue
            if path.name.startswith("random_states_") and path.stat().st_size == 0:
                return f"a rank ended before it had written its {path.name}"
            # Its header, or its table of contents.
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass
            elif path.suffix in (".bin", ".pkl", ".pt"):
                zipfile.ZipFile(path).close()
        format_in(whole)().check(whole)
    except (PermissionError, MemoryError):
        raise  # that says nothing of the files
    except NotebookAccelError as error:  # which names its file
        return str(error)
    except Exception as error:  # whatever the readers of three formats raise
        return explain(path, error)
    return None


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


# Of a loader's state: what every rank writes for itself. Generators are in loader.bin too: a rank
# without a file of its own takes rank 0's.
_OF_RANK = ("generators", "begin", "reader")


class TrainingProgress:
    """Saves and restores random states, gradient accumulation, step counts and loader positions.

    It includes the window: the batches of gradient accumulation between two optimizer steps. Rank 0
    writes the positions of loaders, for all ranks; every rank writes its own random states::

        loader.bin, loader_1.bin, ...   rank 0: the epoch, and the batches given in it
        random_states_0.pkl, ...        each rank: its random states, its place in the window, the
                                        steps, and of each loader the states that are its own

    Ranks have to agree on window, steps and positions. So every rank that sees rank 0's files takes
    these from there. The ``Checkpoints`` of an ``Accelerator`` has one.
    """

    def __init__(self, preparation: Preparation) -> None:
        self._prepared = preparation
        self._request = preparation.request
        self.loaded: Mapping[str, Any] = {}
        """What the newest checkpoint that was loaded has of the place in the training."""
        made = current().shared  # with each Accelerator, on all ranks, the places begin anew
        self._number = made["trainings"] = made.get("trainings", 0) + 1

    @property
    def place(self) -> str:
        """The place in the training; ranks that come to the same line of a loop have the same."""
        steps = [known.num_steps for known in self._prepared.optimizers]
        return f"{self._number} {steps} {self._request.accumulation.step}"

    def states(self, *, of_all: bool = True, save_id: str | None = None) -> dict[str, Any]:
        """Return the contents of this rank's files by name: its own, and those of all ranks."""
        here, window = self._request.topology, self._request.accumulation
        optimizers, is_open = self._prepared.optimizers, self._is_window_open
        own = get_random_states(here.device)
        if is_open:
            own |= {**window.random_states, "step": 0}
            for position in reversed(window.loaders.stack):
                if not position.is_after_step:  # the window began with this pass
                    own |= position.begin
        else:
            own["step"] = window.step
        loaders, steps = self._loaders, [known.num_steps for known in optimizers]
        positions = [one.state(at_step=is_open) for one in loaders]
        start, index = Start(step=max(steps, default=0)), None
        if loaders:
            trained = window.trained_on
            # Not "if trained": that asks a loader for its length, and a stream has none.
            known = [trained is not None and one.is_part_of(trained) for one in loaders]
            index = known.index(True) if any(known) else 0
            epoch, batch, samples = loaders[index].progress(positions[index])
            start = replace(start, epoch=epoch, batch=batch, samples=samples)
        stands = {**asdict(start), "loader": index, "steps": steps, _WRITTEN: time.time()}
        del stands["folder"]
        own |= {
            _KEY: stands,
            SAVE_ID: save_id,
            "knobs": dict(current().knobs),
            "made": [known.made or settings_of(known.optimizer) for known in optimizers],
            "loaders": [{key: state[key] for key in _OF_RANK} for state in positions],
        }
        files = {random_states_file(here.process_index): own}
        for number, state in enumerate(positions if of_all else ()):
            name = numbered("loader", number, ".bin")
            files[name] = {k: v for k, v in state.items() if k not in ("begin", "reader")}
        return files

    @property
    def _is_window_open(self) -> bool:
        """Whether batches have been given that wait for an optimizer step (gradient accumulation).

        A checkpoint keeps no gradients. So while they wait, it keeps the position after the last
        step, from where these batches are read again. After an interrupt, which may come anywhere
        in the loop, it always does.
        """
        context, optimizers = current(), self._prepared.optimizers
        if optimizers and context.is_interrupted and not context.left_with_all:
            return True
        return not self._request.accumulation.sync_gradients or any(
            known.has_unused_gradients for known in optimizers
        )

    def start_in(self, folder: Path) -> Start:
        """Return the place from which training continues, after :meth:`load` of ``folder``.

        ``resume_or_start`` returns it to the user.
        """
        start, index, _ = read_progress(self.loaded)
        start = replace(start, folder=str(folder))
        loaders = dict(enumerate(self._loaders))
        if index not in loaders:
            return start
        # Asked of the loader, since it counts in batches of the ranks that there are now.
        epoch, batch, samples = loaders[index].progress()
        return replace(start, epoch=epoch, batch=batch, samples=samples)

    @property
    def _loaders(self) -> list[PreparedLoader]:
        return [one for one in self._prepared.loaders if isinstance(one, PreparedLoader)]

    def load(self, folder: Path, options: dict[str, Any]) -> None:
        """Restore random states, gradient accumulation, step counts and loader positions."""
        here = self._request.topology
        own = read_random_states(folder, here.process_index, options)
        if own is None:
            self._note_lack(folder)
        else:
            try:
                set_random_states(own, here.device)
            except Exception as error:
                path = folder / random_states_file(here.process_index)
                raise NotebookAccelError(explain(path, error)) from error
        # Where training stands is rank 0's word for all that see it, as a loader's position is:
        # ranks that disagree about their window would wait for each other.
        machine = here.process_index - here.local_process_index
        seen = (read_random_states(folder, rank, options) for rank in (0, machine))
        self.loaded = stands = next((states for states in seen if states is not None), own or {})
        if stands:
            if (torn := stands.get(INTERRUPTED)) is not None:
                notice_once(
                    "of an interrupt",
                    f"{folder} is of an interrupt{torn}: what is drawn from now on (dropout, "
                    "augmentation) is not exactly what would have been drawn; all else is that of "
                    "the last step",
                )
            current().set_knobs(stands.get("knobs", {}))
            self._request.accumulation.reset()
            self._request.accumulation.step = stands.get("step", 0)
            start, index, steps = read_progress(stands)
            optimizers = self._prepared.optimizers
            steps = steps if len(steps) == len(optimizers) else [start.step] * len(optimizers)
            for known, num_steps in zip(optimizers, steps, strict=True):
                known.num_steps = num_steps
            loaders = dict(enumerate(self._loaders))
            if index in loaders:  # so that a save before the next step names the same loader
                self._request.accumulation.trained_on = loaders[index]
        self._request.accumulation.note_random_states()
        self._load_loaders(folder, (own or {}).get("loaders", []), options)

    def _note_lack(self, folder: Path) -> None:
        """Say which ranks of this machine have no file in a checkpoint; the first of them does."""
        here = self._request.topology
        machine = here.process_index - here.local_process_index
        ranks = range(machine, machine + here.local_num_processes)
        lacking = [rank for rank in ranks if read_random_states(folder, rank) is None]
        if here.process_index == lacking[0]:
            notice_once(
                "no random states",
                f"{folder} has no random states for rank {', '.join(map(str, lacking))}, which "
                "took no part in saving it: what these ranks draw from now on (dropout, "
                "augmentation) is not exactly what they would have drawn; all else is",
                from_any_rank=True,
            )

    def _load_loaders(
        self, folder: Path, own: Sequence[Mapping[str, Any]], options: dict[str, Any]
    ) -> None:
        """Restore the position of each prepared loader.

        All ranks take the position from rank 0's file: ranks that disagree about it would wait for
        each other. ``own`` has, for each loader, what this rank saved itself: random states, and
        the state of a dataset that has ``state_dict``. A loader that has no file, or that a loop
        is iterating, is left where it is.
        """
        for index, loader in enumerate(self._loaders):
            name = numbered("loader", index, ".bin")
            # A checkpoint of Accelerate has none, and one may have been made before this loader.
            if not (folder / name).exists():
                if (folder / numbered("dl_state_dict", index, ".bin")).exists():
                    notice_once(
                        "no positions",
                        f"{folder} has the positions of data loaders as Accelerate keeps them "
                        "(dl_state_dict.bin), and they are not read: each begins its epoch anew",
                    )
                continue
            if loader.is_iterated:
                notice(
                    f"load_state() leaves loader {index + 1} of those prepared where it is: a loop "
                    "over it is under way, or a name still holds its iterator. Leave the loop, or "
                    "delete that name, before load_state()"
                )
                continue
            of_all = read_state(folder / name, options)
            loader.load_state_dict({**of_all, **dict(*own[index : index + 1])})
