"""The table of trackers by name, and the function that looks up those of ``log_with``.

To add a tracker, write a file beside this one, and add its class to the import and to the table
here; ``LoggerType`` follows from it. ``compat/_accelerate.py`` has the class's name for
``notebook_accel.tracking``.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from notebook_accel.errors import ConfigError
from notebook_accel.training.settings.handlers import TextEnum
from notebook_accel.training.tracking.mlflow import MLflowTracker
from notebook_accel.training.tracking.tensorboard import TensorBoardTracker
from notebook_accel.training.tracking.tracker import GeneralTracker, LibraryTracker
from notebook_accel.training.tracking.wandb import WandBTracker

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    kind.name: kind for kind in (MLflowTracker, TensorBoardTracker, WandBTracker)
}
# Accelerate's names, in its order; where it is installed, notebook_accel.tracking has its trackers.
_ACCELERATES = (
    *("all", "aim", "tensorboard", "wandb", "trackio"),
    *("comet_ml", "mlflow", "clearml", "dvclive", "swanlab"),
)

LoggerType: Any = TextEnum(  # type: ignore[call-overload]
    "LoggerType",
    {name.upper().replace("_", ""): name for name in (*_ACCELERATES, *LOGGER_TYPE_TO_CLASS)},
)
LoggerType.__doc__ = "Name of a tracker."


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Register a tracker class of your own, so that ``log_with`` finds it by its ``name``.

    The class is registered in this process only, so each rank has to call this. If a tracker of the
    same name is registered already, the class replaces it, with a warning.

    Args:
        tracker_class: a class with the methods of ``GeneralTracker``, usually a subclass.

    Raises:
        ConfigError: ``tracker_class`` is not such a class, or lacks ``name`` or
            ``requires_logging_directory``.
    """
    if not (isinstance(tracker_class, type) and _has_interface(tracker_class)):
        raise ConfigError(
            f"register_tracker_class({tracker_class!r}): expected a class derived from "
            "GeneralTracker, notebook_accel's or Accelerate's"
        )
    _check_class(tracker_class)
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"{tracker_class.__name__} takes the place of the tracker {tracker_class.name!r}",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def get_available_trackers() -> list[TextEnum]:
    """Return the names of the trackers whose library is installed, as members of ``LoggerType``.

    Names that only :func:`register_tracker_class` added are left out.
    """
    return [
        LoggerType(name)
        for name, kind in LOGGER_TYPE_TO_CLASS.items()
        if name in LoggerType.list()
        and (not issubclass(kind, LibraryTracker) or kind.is_available())
    ]


def resolve_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None
) -> list[type[GeneralTracker] | GeneralTracker]:
    """Look up the trackers that ``Accelerator(log_with=...)`` asks for.

    Args:
        log_with: a name, a ``LoggerType``, a subclass or an object of ``GeneralTracker``, or a list
            of these. "all" means every tracker whose library is installed, None no tracker.
        logging_dir: the folder for trackers that write files; None if the user gave none.

    Returns:
        each tracker once: its class, which is not instantiated yet, or the object that was given.

    Raises:
        ConfigError: a name is unknown, a tracker's library is not installed, or a tracker class
            writes files and ``logging_dir`` is None.
    """
    if log_with is None:
        return []
    asked = list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    if "all" in map(str, asked):
        made = [one for one in asked if not isinstance(one, str)]
        asked = [*made, *get_available_trackers()]
    found: list[type[GeneralTracker] | GeneralTracker] = []
    for one in asked:
        tracker = _find(one)
        if tracker in found:
            continue
        if isinstance(tracker, type) and tracker.requires_logging_directory and logging_dir is None:
            raise ConfigError(
                f"Accelerator(log_with={tracker.name!r}): it writes files and has no folder: pass "
                "project_dir=... or project_config=ProjectConfiguration(logging_dir=...)"
            )
        found.append(tracker)
    return found


def _find(asked: Any) -> type[GeneralTracker] | GeneralTracker:
    if not isinstance(asked, type) and _has_interface(asked):
        made: GeneralTracker = asked
        return made
    if isinstance(asked, type) and _has_interface(asked):
        _check_class(asked)
        kind: type[GeneralTracker] | None = asked
    else:
        kind = LOGGER_TYPE_TO_CLASS.get(str(asked))
    if kind is None:
        names = ", ".join(map(repr, ["all", *LOGGER_TYPE_TO_CLASS]))
        raise ConfigError(
            f"Accelerator(log_with={asked!r}): there is no such tracker; expected {names}, or a "
            "GeneralTracker: your own, or one of notebook_accel.tracking (CometMLTracker, "
            "AimTracker and others, which Accelerate brings)"
        )
    if issubclass(kind, LibraryTracker) and not kind.is_available():
        raise ConfigError(
            f"Accelerator(log_with={kind.name!r}): {kind.module} is not installed: "
            f'run pip install "{kind.module}", or leave it out'
        )
    return kind


def _has_interface(tracker: Any) -> bool:
    """Return whether an object or class has the methods of a tracker, whatever its base class is.

    Accelerate's trackers, whose base class is Accelerate's own, are thus accepted too.
    """
    methods = ("start", "store_init_configuration", "log", "finish")
    return all(callable(getattr(tracker, name, None)) for name in methods)


def _check_class(kind: type[GeneralTracker]) -> None:
    needed = ("name", "requires_logging_directory")
    if lacking := [name for name in needed if not hasattr(kind, name)]:
        raise ConfigError(
            f"the tracker class {kind.__name__} lacks {', '.join(lacking)}: set it in the class "
            "(requires_logging_directory is True if it writes files)"
        )
