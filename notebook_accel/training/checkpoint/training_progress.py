"""How far a training is, in a checkpoint: random states, optimizer steps, positions of loaders.

It includes the window: the batches of gradient accumulation between two optimizer steps. Rank 0
writes the positions of loaders, for all ranks; every rank writes its own random states::

    loader.bin, loader_1.bin, ...   rank 0: the epoch, and the batches given in it
    random_states_0.pkl, ...        each rank: its random states, its place in the window, the
                                    steps, and of each loader the states that are its own

Ranks have to agree on window, steps and positions. So every rank that sees rank 0's files takes
these from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from notebook_accel.errors import NotebookAccelError
from notebook_accel.rank.this_rank import current
from notebook_accel.training.checkpoint.start import (
    SAVE_ID,
    Start,
    as_plain,
    random_states_file,
    read_progress,
    read_random_states,
)
from notebook_accel.training.data.loaders import PreparedLoader
from notebook_accel.training.files.state_files import explain, read_state
from notebook_accel.training.files.weights import numbered
from notebook_accel.training.preparing.prepare import Preparation
from notebook_accel.training.processes.random_numbers import get_random_states, set_random_states
from notebook_accel.training.settings.notices import notice, notice_once
from notebook_accel.training.stepping.optimizer import settings_of

# Of a loader's state: what every rank writes for itself, and what is left out of loader.bin.
# Generators are in both: a rank without a file of its own takes rank 0's.
_OF_RANK = ("generators", "begin", "reader")
_NOT_OF_ALL = ("begin", "reader")


class TrainingProgress:
    """Saves and restores random states, gradient accumulation, step counts and loader positions.

    The ``Checkpoints`` of an ``Accelerator`` has one.
    """

    def __init__(self, preparation: Preparation) -> None:
        self._prepared = preparation
        self._plan = preparation.plan
        made = current().shared  # with each Accelerator, on all ranks, the places begin anew
        self._number = made["trainings"] = made.get("trainings", 0) + 1

    @property
    def place(self) -> str:
        """The place in the training; ranks that come to the same line of a loop have the same."""
        steps = [known.num_steps for known in self._prepared.optimizers]
        return f"{self._number} {steps} {self._plan.accumulation.step}"

    def states(self, *, of_all: bool = True, save_id: str | None = None) -> dict[str, Any]:
        """Return the contents of this rank's files by name: its own, and those of all ranks."""
        own = random_states_file(self._plan.topology.process_index)
        loaders = self._loader_files() if of_all else ()
        return {
            **{
                name: {k: v for k, v in self._state_of(one).items() if k not in _NOT_OF_ALL}
                for name, one in loaders
            },
            own: {**self.own_states(), SAVE_ID: save_id},
        }

    def own_states(self) -> dict[str, Any]:
        here = self._plan.topology
        states = get_random_states(here.device)
        window = self._plan.accumulation
        if not self._is_window_open:
            states["step"] = window.step
        else:
            states |= {**window.random_states, "step": 0}
            for position in reversed(window.loaders.stack):
                if not position.is_after_step:  # the window began with this pass
                    states |= position.begin
        states |= {**self._stands(), "knobs": dict(current().knobs)}
        states["made"] = [
            known.made or settings_of(known.optimizer) for known in self._prepared.optimizers
        ]
        states["loaders"] = [
            {k: v for k, v in self._state_of(loader).items() if k in _OF_RANK}
            for _, loader in self._loader_files()
        ]
        return states

    def _stands(self) -> dict[str, Any]:
        """Return epoch, batch, steps and samples so far as plain values."""
        loaders = self._loaders()
        steps = [known.num_steps for known in self._prepared.optimizers]
        step = max(steps, default=0)
        if not loaders:
            return as_plain(Start(step=step), None, steps)
        trained = self._plan.accumulation.trained_on
        # Not "if trained": that asks a loader for its length, and a stream has none.
        known = [trained is not None and one.is_part_of(trained) for one in loaders]
        index = known.index(True) if any(known) else 0
        epoch, batch, samples = loaders[index].progress(self._state_of(loaders[index]))
        return as_plain(Start(epoch=epoch, batch=batch, step=step, samples=samples), index, steps)

    @property
    def _is_window_open(self) -> bool:
        """Whether gradients of earlier batches wait for an optimizer step (gradient accumulation).

        A checkpoint keeps no gradients. So while they wait, it keeps the position after the last
        step, from where these batches are read again.
        """
        return not self._plan.accumulation.sync_gradients or any(
            known.has_unused_gradients for known in self._prepared.optimizers
        )

    def _state_of(self, loader: PreparedLoader) -> dict[str, Any]:
        return loader.state_at_step() if self._is_window_open else loader.state_dict()

    def start_in(self, folder: Path) -> Start:
        """Return the place from which training continues, after :meth:`load` of ``folder``.

        ``resume_or_start`` returns it to the user.
        """
        start, index, _ = read_progress(self._states_of_all(folder))
        start = replace(start, folder=str(folder))
        loaders = dict(enumerate(self._loaders()))
        if index not in loaders:
            return start
        # Asked of the loader, since it counts in batches of the ranks that there are now.
        epoch, batch, samples = loaders[index].progress()
        return replace(start, epoch=epoch, batch=batch, samples=samples)

    def settings_in(self, folder: Path) -> list[list[dict[str, Any]]] | None:
        """Return with which settings the optimizers of a checkpoint were made, if it has them."""
        return (self._states_of_all(folder) or {}).get("made")

    def _states_of_all(
        self, folder: Path, options: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Return the random states of rank 0, or else of the first rank whose file is seen here."""
        here = self._plan.topology
        machine = here.process_index - here.local_process_index
        for rank in (0, machine, here.process_index):
            if (states := read_random_states(folder, rank, options)) is not None:
                return states
        return None

    def _loaders(self) -> list[PreparedLoader]:
        return [one for one in self._prepared.loaders if isinstance(one, PreparedLoader)]

    def _loader_files(self) -> Iterator[tuple[str, PreparedLoader]]:
        """Yield (file name, loader) for each prepared loader."""
        for index, loader in enumerate(self._loaders()):
            yield numbered("loader", index, ".bin"), loader

    def load(self, folder: Path, options: dict[str, Any]) -> None:
        """Restore random states, gradient accumulation, step counts and loader positions."""
        here = self._plan.topology
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
        stands = self._states_of_all(folder, options)
        if stands is not None:
            current().set_knobs(stands.get("knobs", {}))
            self._plan.accumulation.reset()
            self._plan.accumulation.step = stands.get("step", 0)
            start, index, steps = read_progress(stands)
            optimizers = self._prepared.optimizers
            steps = steps if len(steps) == len(optimizers) else [start.step] * len(optimizers)
            for known, num_steps in zip(optimizers, steps, strict=True):
                known.num_steps = num_steps
            loaders = dict(enumerate(self._loaders()))
            if index in loaders:  # so that a save before the next step names the same loader
                self._plan.accumulation.trained_on = loaders[index]
        self._plan.accumulation.note_random_states()
        self._load_loaders(folder, (own or {}).get("loaders", []), options)

    def _note_lack(self, folder: Path) -> None:
        """Say which ranks of this machine have no file in a checkpoint; the first of them does."""
        here = self._plan.topology
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
        for index, (name, loader) in enumerate(self._loader_files()):
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
