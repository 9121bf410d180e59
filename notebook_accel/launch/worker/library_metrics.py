"""Reports what libraries log to the notebook, as ``accelerator.log`` would; they save and stop.

Nothing is imported for it. Each library is changed in the rank's process alone, once a rank has
imported it, by what it offers itself:

- transformers and TRL: the list of callbacks that every ``Trainer`` gets
- fastai: the list of callbacks that every ``Learner`` gets
- Lightning: an entry point (pyproject.toml), which a ``Trainer`` asks for callbacks
- TensorBoard: the methods ``add_scalar`` and ``add_scalars`` of torch's ``SummaryWriter``

The trackers that these libraries feed stay as they are.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from notebook_accel.rank import this_rank
from notebook_accel.system.modules import change_module

_NEWEST = "newest metrics of libraries"
# What they write by a SummaryWriter has been reported already, partly under other names.
_HEARD_ALREADY = {"fastai", "notebook_accel", "transformers"}


def install() -> None:
    """Have what libraries log in this process reported to the notebook."""
    change_module("transformers.trainer", _follow_transformers)
    change_module("fastai.learner", _follow_fastai)
    change_module("torch.utils.tensorboard.writer", _follow_summary_writer)
    for package in ("lightning.pytorch", "pytorch_lightning"):
        change_module(f"{package}.trainer.connectors.callback_connector", _draw_by_tqdm)


def _report(values: Mapping[str, Any], step: int | None) -> None:
    """Report the numbers among ``values``, but for what has just been reported for this step."""
    newest: dict[str, Any] = this_rank.current().shared.setdefault(_NEWEST, {})
    numbers = {}
    for name, value in values.items():
        if not isinstance(value, str):
            with suppress(TypeError, ValueError, RuntimeError):  # a text, an image, a table
                # A loss as it is has gradients, and torch warns of its conversion.
                numbers[name] = float(value.detach() if hasattr(value, "detach") else value)
    # A Lightning Trainer may have a SummaryWriter beside our callback.
    new = {name: one for name, one in numbers.items() if newest.get(name) != (step, str(one))}
    newest.update({name: (step, str(one)) for name, one in new.items() if step is not None})
    if new:
        this_rank.current().metric(new, step)


def _follow_transformers(trainer: Any) -> None:
    class TrainerMetrics(trainer.TrainerCallback):  # type: ignore[misc]
        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            if state.is_world_process_zero:
                _report(logs or {}, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # In this order: a save comes with a read of should_stop, as all that is asked.
            self.on_prediction_step(args, state, control)
            control.should_save |= this_rank.current().should_save()

        # An evaluation may take longer than a stop waits to be heard.
        def on_prediction_step(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
            # The function goes on after train(), and keeps its model.
            control.should_training_stop |= this_rank.current().should_stop()

        def __reduce__(self) -> tuple[Any, ...]:
            return trainer.TrainerCallback, ()  # outside of the ranks there is nothing to show

    trainer.DEFAULT_CALLBACKS.append(TrainerMetrics)


def _follow_fastai(learner: Any) -> None:
    class LearnerMetrics(learner.Callback):  # type: ignore[misc]
        order = learner.Recorder.order + 1
        num_batches = 0
        bar = tqdm(disable=True)

        def before_fit(self) -> None:
            # The search for a learning rate and predictions are fits, too.
            is_training = not hasattr(self.learn, "lr_finder") and not hasattr(self, "gather_preds")
            self.run = is_training and learner.rank_distrib() == 0

        def before_train(self) -> None:
            is_drawn = hasattr(self.learn, "progress")  # its own bar, which needs a notebook
            self.bar = tqdm(total=len(self.dl), desc=f"epoch {self.epoch}", disable=not is_drawn)

        def after_batch(self) -> None:
            if self.training:
                self.num_batches += 1
                _report({"train_loss": self.smooth_loss}, self.num_batches)
                self.bar.update()

        def after_train(self) -> None:
            self.bar.close()

        after_fit = after_train  # a fit or an epoch that is cancelled ends without after_train

        def after_epoch(self) -> None:
            self.bar.close()
            names, logged = self.recorder.metric_names, self.recorder.log
            # Without training, as in validate(), there are fewer columns than names.
            if len(names) == len(logged):
                _report({**dict(zip(names, logged, strict=True)), "time": ""}, self.num_batches)

        def __reduce__(self) -> tuple[Any, ...]:
            return learner.Callback, ()  # an exported learner needs nothing of ours

    learner.defaults.callbacks.append(LearnerMetrics)


def _follow_summary_writer(module: Any) -> None:
    def follow(name: str) -> None:
        plain = getattr(module.SummaryWriter, name)
        bind = inspect.signature(plain).bind

        @functools.wraps(plain)
        def add(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            _, tag, given, *_ = bind(*args, **kwargs).args
            step = bind(*args, **kwargs).arguments.get("global_step")
            is_one = name == "add_scalar"
            values = {tag: given} if is_one else {f"{tag}/{one}": given[one] for one in given}
            here: Any = inspect.currentframe()
            caller = str(here.f_back.f_globals.get("__name__"))
            # Lightning's logger writes this number where a model has hyperparameters and no result.
            is_placeholder = values == {"hp_metric": -1}
            if caller.partition(".")[0] not in _HEARD_ALREADY and not is_placeholder:
                _report(values, step)

        setattr(module.SummaryWriter, name, add)

    follow("add_scalar")
    follow("add_scalars")


def _draw_by_tqdm(connector: Any) -> None:
    """Have Lightning draw tqdm's bars, which the notebook shows, where it would draw rich's."""
    # Its import must not fail where it is a folder on the path, which has no version.
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version(connector.__name__.partition(".")[0])
        # Earlier ones make none by themselves, and where a bar is of rich's class rich's summary.
        if tuple(map(int, version.split(".")[:2])) >= (2, 6):
            connector.RichProgressBar = connector.TQDMProgressBar


def lightning_callbacks(package: str = "lightning.pytorch") -> list[Any]:
    """Return the callbacks that Lightning's Trainer adds by itself; none outside of our ranks."""
    if not (this_rank.has_context() and this_rank.current().launched):
        return []
    lightning: Any = sys.modules[package]

    class LightningLogger(lightning.loggers.logger.DummyLogger):  # type: ignore[misc]
        # A progress bar shows the versions of all loggers that differ.
        version = property(lambda self: self.first.version)

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            _report(metrics, step)

    class LightningMetrics(lightning.Callback):  # type: ignore[misc]
        def setup(self, trainer: Any, *_: Any, **_stage: Any) -> None:
            # Its first logger decides on folders: where it has none, ours would be that.
            self.reads = not trainer.loggers and trainer.is_global_zero
            self.seen: dict[str, Any] = {}
            # Whether a metric has first been logged by a batch, and not at the end of an epoch.
            self.of_batches: dict[str, bool] = {}
            known = any(isinstance(one, LightningLogger) for one in trainer.loggers)
            if trainer.loggers and trainer.is_global_zero and not known:
                ours = LightningLogger()
                ours.first = trainer.loggers[0]
                trainer.loggers.append(ours)

        def look(self, trainer: Any, *_: Any, is_batch: bool = False) -> None:
            if self.reads and not trainer.sanity_checking:
                logged = trainer.logged_metrics
                # It keeps the old values of all others.
                new = {
                    name: one
                    for name, one in logged.items()
                    if self.of_batches.setdefault(name, is_batch) >= is_batch
                    and one is not self.seen.get(name)
                }
                self.seen = dict(logged)
                _report(new, max(0, trainer.global_step - 1))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            _stop_lightning(self, trainer)  # first: a save comes with a read of should_stop
            if this_rank.current().should_save():
                of = trainer.checkpoint_callback
                folder = Path((of and of.dirpath) or trainer.default_root_dir)
                trainer.save_checkpoint(folder / f"step={trainer.global_step}.ckpt")
            if trainer.global_step % trainer.log_every_n_steps == 0:
                self.look(trainer, is_batch=True)

        on_validation_batch_end = _stop_lightning
        on_train_epoch_end = on_train_end = on_validation_end = on_test_end = look

    return [LightningMetrics()]


def _stop_lightning(_callback: Any, trainer: Any, *_: Any) -> None:
    if this_rank.current().should_stop():
        trainer.should_stop = True
        # Else it would train on until it has made as many.
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None


def pytorch_lightning_callbacks() -> list[Any]:
    """Return the same for the package ``pytorch_lightning``, the older name of Lightning."""
    return lightning_callbacks("pytorch_lightning")
