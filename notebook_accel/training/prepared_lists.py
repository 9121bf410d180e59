"""The lists of what was prepared, by the names under which Accelerate's users reach into it.

Accelerate has no public names for them, and scripts use the private ones::

    accelerator._optimizers = []            # before load_state() of a checkpoint without them
    accelerator._dataloaders.clear()        # to let go of loaders, and of their workers
    accelerator._models.append(model)       # for a checkpoint of a model that was not prepared
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import TYPE_CHECKING, Any

from notebook_accel.training.prepare import PreparedModel, without_wrappers

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Iterable

    from notebook_accel.training.checkpoint import Checkpoints
    from notebook_accel.training.prepare import Preparation

__all__ = ["PreparedLists"]


class PreparedLists:
    """Part of ``Accelerator``: what it prepared, in the order of its checkpoints' files."""

    _prepared: Preparation
    _checkpoints: Checkpoints

    @property
    def _models(self) -> MutableSequence[Any]:
        return _Models(self._prepared)

    @_models.setter
    def _models(self, models: Iterable[Any]) -> None:
        self._models[:] = models

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether an optimizer was prepared that steps as it goes back (``lomo_backward``)."""
        return any(hasattr(one.optimizer, "fused_backward") for one in self._prepared.optimizers)

    @property
    def _optimizers(self) -> list[Any]:
        return self._prepared.optimizers

    @_optimizers.setter
    def _optimizers(self, optimizers: Iterable[Any]) -> None:
        self._prepared.optimizers[:] = optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return self._prepared.schedulers

    @_schedulers.setter
    def _schedulers(self, schedulers: Iterable[Any]) -> None:
        self._prepared.schedulers[:] = schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self._prepared.loaders

    @_dataloaders.setter
    def _dataloaders(self, loaders: Iterable[Any]) -> None:
        self._prepared.loaders[:] = loaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self._checkpoints.custom

    @_custom_objects.setter
    def _custom_objects(self, objects: Iterable[Any]) -> None:
        self._checkpoints.custom[:] = objects

    @property
    def _save_model_state_pre_hook(self) -> OrderedDict[int, Callable[..., None]]:
        return self._checkpoints.save_hooks

    @property
    def _load_model_state_pre_hook(self) -> OrderedDict[int, Callable[..., None]]:
        return self._checkpoints.load_hooks


class _Models(MutableSequence[Any]):
    """The models as they are called, over the list in which each has the user's own beside it."""

    def __init__(self, prepared: Preparation) -> None:
        self._prepared = prepared

    def __len__(self) -> int:
        return len(self._prepared.models)

    def __getitem__(self, index: Any) -> Any:
        return [known.wrapped for known in self._prepared.models][index]

    def __setitem__(self, index: Any, value: Any) -> None:
        several = isinstance(index, slice)
        known: Any = [self._known(one) for one in value] if several else self._known(value)
        self._prepared.models[index] = known

    def __delitem__(self, index: Any) -> None:
        del self._prepared.models[index]

    def insert(self, index: int, value: Any) -> None:
        self._prepared.models.insert(index, self._known(value))

    def _known(self, model: Any) -> PreparedModel:
        known = (each for each in self._prepared.models if each.wrapped is model)
        return next(known, PreparedModel(without_wrappers(model), model, True))
