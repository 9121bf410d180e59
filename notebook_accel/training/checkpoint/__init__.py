"""Checkpoints: ``Checkpoints`` saves and loads the state of everything that was prepared.

A checkpoint is a folder that is complete or not there. It has a file for each model, optimizer and
so on, or a folder where ranks wrote sharded weights. How a checkpoint is read depends on the files
that it has, not on the parallelism of the training. So it can be loaded under another kind of
parallelism than it was saved under.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn import Module

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.private import of_torch
from notebook_accel.rank.this_rank import current
from notebook_accel.training import files
from notebook_accel.training.checkpoint import saves, start
from notebook_accel.training.collectives import broadcast_object_list, gather_object
from notebook_accel.training.files.atomic import complete_version
from notebook_accel.training.files.state_files import on_host, read_state
from notebook_accel.training.preparing import Preparation
from notebook_accel.training.settings.handlers import ProjectConfiguration
from notebook_accel.training.settings.notices import notice, notice_once
from notebook_accel.training.stepping.optimizer import settings_of
from notebook_accel.wire import Saved

# The longest that an interrupt goes unheard while the rank waits for the thread that saves.
_SLICE_SECONDS = 0.1


class Checkpoints:
    """Writes and reads the checkpoints of one ``Accelerator``."""

    def __init__(self, preparation: Preparation, project: ProjectConfiguration) -> None:
        self.custom: list[Any] = []
        self.save_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._prepared = preparation
        self._progress = start.TrainingProgress(preparation)
        self._request, self._strategy = preparation.request, preparation.strategy
        self._project = project
        self.numbering = start.Numbering(project)
        self._background_save: tuple[Path, futures.Future[None]] | None = None
        self._unsettled: list[saves.Save] = []  # on ranks that do not publish
        self._began: start.Start | None = None  # where the launch's resume= had this training go on
        preparation.checkpoints = weakref.ref(self)

    def register(self, objects: Sequence[Any]) -> None:
        """Add objects whose ``state_dict`` is saved in each checkpoint, and restored from it."""
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

    def save(
        self,
        output_dir: str | os.PathLike[str] | None,
        *,
        safe: bool,
        in_background: bool = False,
        own_options: dict[str, Any] | None = None,
    ) -> str:
        """Write a checkpoint; return its folder. If models are whole, rank 0 may call it alone.

        On rank 0 the checkpoint is there when this returns, unless it is written in the background.

        Args:
            output_dir: the folder; None makes the next numbered checkpoint.
            safe: the file format of the weights: safetensors if True, torch's files if False. It
                has no effect on sharded weights, nor where DeepSpeed writes the model.

        Raises:
            NotebookAccelError: a rank did not call this, could not write its files, or does not see
                rank 0's disk; or an earlier save in the background failed.
        """
        self._end_background_save()
        current().settle_device()
        asked = None if output_dir is None else start.resolved(output_dir)
        if asked is None:
            self.numbering.folder()  # raises on every rank alike where there is none
        save = self._begin_save(asked)
        finish = partial(self._finish, save, is_numbered=asked is None)
        try:
            # First: the pieces are collected as they are asked for, in its folder.
            save.open(asked, self.numbering)
            pieces = self._pieces(save, safe=safe, own_options=own_options or {})
            if not in_background:
                finish(*files.write_one_by_one(pieces, save.staged))
            else:
                taken = list(pieces)
                states = saves.host_copies([piece.state for piece in taken])
                for piece, state in zip(taken, states, strict=True):
                    piece.state = state
                    piece.prepare(save.staged)
        except BaseException as error:
            save.fail(error)
            raise
        if in_background:
            written = saves.in_background(
                save,
                lambda: finish(taken, files.write_prepared(taken, save.staged)),
                self._request.topology.device,
            )
            self._background_save = save.final, written
        if not save.joint and not save.writes:
            self._unsettled.append(save)
        if in_background or self._unsettled:
            current().before_return[self] = self.wait
        if asked is None:
            self.numbering.follow(save.final)
        return str(save.final)

    @property
    def needs_all(self) -> bool:
        """Whether a model is spread over several ranks, which all take part in saving it."""
        return self._strategy.saves_together and self._request.topology.num_processes > 1

    def _begin_save(self, asked: Path | None) -> saves.Save:
        """Return the next save; drop earlier ones that have ended, or that rank 0 passed by."""
        here, each_machine = self._request.topology, self._project.save_on_each_node
        if self.needs_all:
            saves.meet("save_state()", here)
            each_machine &= not self._strategy.saves_shards  # one needs those of all machines
        place = self._progress.place
        earlier, self._unsettled = self._unsettled, []
        for one in earlier:
            if one.look():
                continue
            if one.has_begun or one.place == place:
                self._unsettled.append(one)
            else:
                one.give_up()
        return saves.Save(here, place, asked, each_machine=each_machine, joint=self.needs_all)

    def _finish(
        self,
        save: saves.Save,
        written: Sequence[files.Piece],
        results: Sequence[Any],
        *,
        is_numbered: bool,
    ) -> None:
        """Publish the checkpoint once this rank has written its files.

        If the save is in the background, the thread that writes calls it.
        """
        save.finish(results, lambda of_ranks: files.complete(written, of_ranks))
        limit = self._project.total_limit
        if save.writes and is_numbered and limit is not None:
            for _, folder in self.numbering.existing()[:-limit]:
                shutil.rmtree(folder, ignore_errors=True)
        if self._request.topology.process_index == 0:
            current().report(Saved, folder=str(save.final))

    def wait(self) -> None:
        """Wait until this rank's saves have ended; raise ``NotebookAccelError`` if one failed."""
        current().before_return.pop(self, None)
        self._end_background_save()
        unsettled, self._unsettled = self._unsettled, []
        for one in unsettled:
            if not one.settle():
                notice(
                    f"nothing was saved to {one.final}: rank 0, which writes, did not call "
                    "save_state()",
                    from_any_rank=True,
                )

    def _end_background_save(self) -> None:
        if self._background_save is None:
            return
        (final, written), self._background_save = self._background_save, None
        while not futures.wait([written], _SLICE_SECONDS).done:
            pass  # in slices, so that an interrupt is heard
        if (error := written.exception()) is not None:
            raise NotebookAccelError(
                f"{final} could not be written: {saves.describe(error)}. Earlier checkpoints are "
                "as they were"
            ) from error

    def load(
        self,
        input_dir: str | os.PathLike[str] | None,
        *,
        load_kwargs: dict[str, Any] | None = None,
        strict: bool = True,
        own_options: dict[str, Any] | None = None,
    ) -> None:
        """Read a checkpoint into everything that was prepared or registered; all ranks call it.

        Args:
            input_dir: the folder; None takes the newest numbered checkpoint.

        Raises:
            FileNotFoundError: there is no such checkpoint, or it lacks a file for a prepared
                object.
            RuntimeError: the checkpoint has states of more registered objects than are registered
                now, or does not fit the model.
        """
        # Other Accelerators' saves, too: one may still be writing what is to be read.
        for wait in (*current().before_return.values(), self.wait):
            wait()
        asked = self.numbering.newest() if input_dir is None else start.resolved(input_dir)
        folder = complete_version(asked)
        if not any(start.is_ours(name) for name in files.entries(folder)) and not self.load_hooks:
            raise FileNotFoundError(
                f"there is no checkpoint in {files.describe_folder(folder)}. Save one first, or "
                "pass the folder that save_state() returned as input_dir"
            )
        saved = sorted(name for name in files.entries(folder) if start.CUSTOM.fullmatch(name))
        if len(saved) > len(self.custom):
            raise RuntimeError(
                f"{folder} has the states of {len(saved)} registered objects "
                f"({', '.join(saved)}), and {len(self.custom)} are registered: call "
                "register_for_checkpointing() with all of them, in the same order, before loading"
            )
        start.check_shapes([known.plain for known in self._prepared.models], folder)
        for known in self._prepared.optimizers:
            if known.made is None:
                known.made = settings_of(known.optimizer)
        models = [known.inner for known in self._prepared.models]
        options = load_kwargs or {}
        for hook in self._hooks_for(folder, options):
            hook(models, str(folder))
        if not self._strategy.read_own(folder, own_options or {}, strict=strict):
            self._read_trained(models, folder, options, strict=strict)
        self._load_stateful(folder, options)
        self._progress.load(folder, on_host(options))
        for known in self._prepared.optimizers:
            known.drop_gradients()  # from before the load
        if input_dir is None:
            self.numbering.follow(asked)

    def _hooks_for(self, folder: Path, options: dict[str, Any]) -> tuple[Callable[..., None], ...]:
        if not self.load_hooks or not start.is_of_stop(folder, options):
            return tuple(self.load_hooks.values())
        notice_once(
            "no hooks",
            f"{folder} is of a stop, which no save hook has seen: load hooks are not called, and "
            "what they restore beside the models (an average of weights, say) begins anew",
        )
        return ()

    def _read_trained(
        self, models: Sequence[Module], folder: Path, options: dict[str, Any], *, strict: bool
    ) -> None:
        """Read the optimizers, and those models that no hook has taken out of the list."""
        strategy = self._strategy
        names = files.names_of([known.plain for known in self._prepared.models])
        layout = start.format_in(folder)(names=names, options=options, strict=strict)
        for index, model in enumerate(map(of_torch.original_module, models)):
            weights = layout.read_model(model, folder, index)
            if weights is not None:
                strategy.load_state_dict(model, files.with_ties(weights, model), strict=strict)
        for index, known in enumerate(self._prepared.optimizers):
            state = layout.read_optimizer(known.optimizer, folder, index)
            if state is not None:
                strategy.load_optimizer_state(known.optimizer, state)

    def resume(self, folder: str | os.PathLike[str]) -> start.Start:
        """Load the newest readable checkpoint under ``folder``; all ranks call it.

        All ranks load the same checkpoint: they pass over one that some rank cannot read. Later
        numbered saves continue the numbers of the checkpoints under ``folder``.

        Raises:
            NotebookAccelError: there are checkpoints whose files looked complete, and none of them
                could be loaded; or a rank sees none of the checkpoints that rank 0 found.
            RuntimeError, ValueError: the checkpoint is of another model or optimizer.
        """
        self.wait()
        self._agree(None)  # now the saves of all ranks have ended
        root = start.resolved(folder)
        found: list[Path]
        (found,) = broadcast_object_list([start.candidates(root)])
        # Numbers go on in ``root``, or in its ``checkpoints``.
        inner, project = root / "checkpoints", self._project
        is_project = start.resolved(project.project_dir or "") == root
        numbered = {one.parent for one in found if start.NUMBERED.fullmatch(one.name)}
        is_inner = project.automatic_checkpoint_naming and is_project
        if numbered:
            is_inner = inner in numbered
        self.numbering.parent = inner if is_inner else root
        if self._began or current().resume_from:
            return self.resume_launch()
        return self._load_newest(root, found) or start.Start()

    def resume_launch(self, *, is_asked: bool = True) -> start.Start:
        """Load, once, what the launch's ``resume=`` says; all ranks call it.

        Args:
            is_asked: whether the function has called ``resume_or_start``.
        """
        if self._began is not None:
            return self._began
        for hook in self._prepared.resumers:
            hook.remove()
        self._prepared.resumers.clear()
        context = current()
        root, context.resume_from = Path(context.resume_from), ""
        optimizers = self._prepared.optimizers
        made = [settings_of(known.optimizer) for known in optimizers]
        found: list[Path]
        (found,) = broadcast_object_list([start.candidates(root)])
        began = self._load_newest(root, found)
        if began is None or began.folder is None:
            raise FileNotFoundError(
                f"resume=: there is no checkpoint in {files.describe_folder(root)}, as seen by "
                "rank 0"
            )
        before = self._progress.loaded.get("made")
        if before is None:
            before = [settings_of(known.optimizer) for known in optimizers]
        start.give_new_settings(optimizers, self._prepared.schedulers, made, before)
        context.set_knobs(context.first_knobs)
        if not is_asked:
            notice(
                f"the training goes on from {began.folder} (step {began.step}). The function "
                f"counts its epochs anew, and the first begins at batch {began.batch}: "
                "accelerator.resume_or_start(dir) tells it the epoch"
            )
        self._began = began
        return began

    def _load_newest(self, root: Path, found: Sequence[Path]) -> start.Start | None:
        is_unseen = bool(found) and not any(one.exists() for one in found)
        text = f"not seen on the machine of rank {self._request.topology.process_index}"
        if unseen := self._agree(text if is_unseen else None):
            raise NotebookAccelError(
                f"{found[0]}, which rank 0 would resume from, is {unseen}: keep checkpoints on a "
                "disk that all machines share, at the same path"
            )
        failed: list[str] = []
        for one in found:
            damage = self._agree(start.find_damage(one))
            if not damage:
                own = None
                try:
                    self.load(one)
                except (ConfigError, PermissionError):
                    raise  # nothing is wrong with the files
                except (NotebookAccelError, OSError) as error:
                    own = saves.describe(error)
                damage = self._agree(own)
                if not damage:
                    return self._progress.start_in(one)
                failed.append(damage)
            notice(f"resume_or_start() passes over {one}: {damage}")
        if failed:
            raise NotebookAccelError(
                f"none of the checkpoints in {root} could be loaded, and the last attempt may have "
                f"changed weights: {failed[-1]}. Move them away to begin anew"
            )
        return None

    @staticmethod
    def _agree(damage: str | None) -> str:
        """Return on all ranks the text of the lowest rank that found damage; "" if none did.

        All ranks call it, each with a text about the damage that it found, or with None.
        """
        return next((text for text in gather_object([damage or ""]) if text), "")

    def _pieces(
        self, save: saves.Save, *, safe: bool, own_options: dict[str, Any]
    ) -> Iterator[files.Piece]:
        """Yield this rank's pieces (files) of a checkpoint; save hooks run first.

        If weights are sharded, all ranks iterate over it at the same time, since this joins them.
        """
        strategy, writes = self._strategy, save.writes
        models = [known.inner for known in self._prepared.models]
        # Whole weights that are joined from parts go only to ranks that write; the others help to
        # join and get nothing, so their hosts need no room for them.
        full = not strategy.saves_shards
        plain = [known.plain for known in self._prepared.models]
        weights = [strategy.state_dict(model, full=full, keeps=writes) for model in plain]
        for hook in tuple(self.save_hooks.values()):
            hook(models, weights, str(save.of_hooks))
        layout = strategy.format(
            names=files.names_of(plain),
            options=own_options,
            writes=writes,
            safe=safe,
            whole_state=partial(strategy.optimizer_state, keeps=writes),
        )
        yield from layout.pieces(weights, [known.optimizer for known in self._prepared.optimizers])
        if writes:
            for name, item in self._stateful():
                yield files.state_file(item.state_dict(), name, type(item).__name__)
        for name, state in self._progress.states(of_all=writes, save_id=save.id).items():
            yield files.state_file(state, name, "the data loaders or random numbers")

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        """Yield (file name, object): schedulers, registered objects and the loss scaler."""
        for index, scheduler in enumerate(self._prepared.schedulers):
            yield files.numbered("scheduler", index, ".bin"), scheduler
        for index, item in enumerate(self.custom):
            yield f"custom_checkpoint_{index}.pkl", item
        if self._strategy.scaling is not None:
            yield files.SCALER_NAME, self._strategy.scaling.scaler

    def _load_stateful(self, folder: Path, options: dict[str, Any]) -> None:
        for name, item in self._stateful():
            if name == files.SCALER_NAME and not (folder / name).exists():
                notice_once("no scaler", f"{folder} has no loss scale: it begins anew")
            else:
                item.load_state_dict(read_state(files.required(folder / name), options))

    def states_at_stop(self) -> dict[str, Any]:
        """Return, by their names, this rank's files of a checkpoint but for models and optimizers.

        No other rank takes part.
        """
        states: dict[str, Any] = {name: item.state_dict() for name, item in self._stateful()}
        return {**states, **self._progress.states()}
