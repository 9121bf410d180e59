"""Base classes of trackers, for this package's trackers and those that users write.

A tracker sends the metrics of a training to a tool that stores them, such as TensorBoard.
``Accelerator`` makes it, calls ``start`` once, ``store_init_configuration`` if there are settings,
``log`` again and again, and ``finish`` at the end, all on the main process only. The functions at
the end of this file flatten nested dictionaries of logged values, and convert values to numbers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from notebook_accel.rank.this_rank import current
from notebook_accel.training.processes import topology
from notebook_accel.training.settings.environment import is_installed
from notebook_accel.training.settings.handlers import ProjectConfiguration
from notebook_accel.training.settings.notices import notice_once

_Function = TypeVar("_Function", bound="Callable[..., Any]")


class GeneralTracker:
    """Base class of all trackers, including those that you write.

    A subclass has to define ``name``, ``requires_logging_directory`` and ``tracker`` (an attribute
    or a property). It overrides ``log``, and those of the other methods that its tool supports.

    Attributes:
        name: name by which ``log_with`` and ``get_tracker`` find the tracker.
        requires_logging_directory: whether the tracker writes files. If so, ``Accelerator`` passes
            the folder as the second argument when it makes the tracker.
        main_process_only: whether methods decorated by ``on_main_process`` run on rank 0 only;
            False runs them on all ranks.
        tracker: the object of the library behind the tracker; None if there is no library.

    Example:
        >>> from notebook_accel import Accelerator
        >>> from notebook_accel.tracking import GeneralTracker, on_main_process
        >>> class Printer(GeneralTracker):
        ...     name = "printer"
        ...     requires_logging_directory = False
        ...     tracker = None
        ...     @on_main_process
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> accelerator = Accelerator(log_with=Printer())
        >>> accelerator.init_trackers("demo")
        >>> accelerator.log({"loss": 0.5}, step=1)
        1 {'loss': 0.5}
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True

    if TYPE_CHECKING:

        @property
        def tracker(self) -> Any:
            """The object of the tracking library that this tracker uses."""

    def __init__(self, _blank: bool = False) -> None:
        """Check that the subclass has defined the three attributes that it needs.

        They are ``name``, ``requires_logging_directory`` and ``tracker``.

        Args:
            _blank: skip the check, as Accelerate's code does for ranks that do not track.

        Raises:
            NotImplementedError: one of the three attributes is missing.
        """
        needed = ("name", "requires_logging_directory", "tracker")
        # dir() and not hasattr(): a property may only work once the tracker has started.
        lacking = [name for name in needed if name not in dir(self)]
        if lacking and not _blank:
            raise NotImplementedError(
                f"the tracker class {type(self).__name__} lacks {', '.join(lacking)}: "
                "define them in the class"
            )

    def start(self) -> None:
        """Begin a run of the tracking library; called once, on the main process."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the settings of the training (hyperparameters), by name."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store metrics by name, for the training step ``step`` (None if not given)."""

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store images: for each name several images, as arrays or PIL images.

        In a tracker that does not override this method, the first call on a rank shows a notice,
        and no image is stored.
        """
        notice_once(f"images {self.name}", f"the tracker {self.name!r} keeps no images")

    def finish(self) -> None:
        """Write everything that is not written yet, and end the run; called once at the end."""


class BlankTracker(GeneralTracker):
    """A tracker that stores nothing; ``get_tracker`` returns it on ranks that do not track.

    So a script can log on every rank without asking for the rank first.
    """

    name = "blank"
    requires_logging_directory = False

    @property
    def tracker(self) -> None:
        """Return None: no library is behind it."""

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Do nothing with the images."""

    def log_table(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing with the table, which wandb's tracker on rank 0 would log."""


class LibraryTracker(GeneralTracker):
    """Base class of trackers that use a tracking library, such as TensorBoard's or MLflow's.

    The library is imported only when a run begins. A subclass also has the attribute by which
    Accelerate names its ``tracker``, such as ``writer``.
    """

    module: ClassVar[str]
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        """Store the arguments until ``start`` uses them."""
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._run: Any = None

    @property
    def tracker(self) -> Any:
        """The library's object for this run; None before ``start``."""
        return self._run

    @classmethod
    def is_available(cls) -> bool:
        """Whether the library is installed."""
        return is_installed(cls.module)

    @classmethod
    def library(cls) -> Any:
        """Import the library and return its module."""
        return importlib.import_module(cls.module)


def on_main_process(function: _Function) -> _Function:
    """Decorate a tracker's method so that ``main_process_only`` restricts it to rank 0.

    Args:
        function: the method. If the tracker's attribute ``main_process_only`` is True, a call runs
            the method on rank 0, and returns None on the other ranks. If the attribute is False or
            missing, a call runs the method on every rank.
    """

    @functools.wraps(function)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        everywhere = not getattr(self, "main_process_only", False)
        if everywhere or topology.topology().process_index == 0:
            return function(self, *args, **kwargs)
        return None

    return called  # type: ignore[return-value]


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) pairs; values in nested dictionaries are named "key/inner key".

    ``prefix`` is put before each name.
    """
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{name}/")
        else:
            yield name, value


def as_number(value: Any) -> float | None:
    """Return a Python number, or the only number of a tensor or array, as a float.

    Return None if the value is something else.
    """
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    if isinstance(value, numbers.Real):
        return float(value)
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        item = value.item()
        return float(item) if isinstance(item, numbers.Real) else None
    return None


def numbers_of(values: Mapping[str, Any], tracker: str = "") -> dict[str, float]:
    """Return the numbers among ``values`` by flat names, as in :func:`flatten`.

    A value that is no number is left out, with a notice the first time for each name.
    """
    found: dict[str, float] = {}
    for name, value in flatten(values):
        number = as_number(value)
        if number is None:
            whose, lost = (f"{tracker}: ", "not kept") if tracker else ("", "not shown")
            notice_once(
                f"no number {tracker} {name}",
                f"{whose}{name!r} is a {type(value).__name__}, no number: {lost}",
            )
        else:
            found[name] = number
    return found


def with_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with Python numbers in place of tensors and arrays of one number.

    Nested dictionaries are converted likewise. All other values are left unchanged, for libraries
    that also take images or tables.
    """
    ready: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            ready[name] = with_numbers(value)
        else:
            number = None if isinstance(value, (bool, int, float)) else as_number(value)
            ready[name] = value if number is None else number
    return ready


class Tracking:
    """The trackers of one ``Accelerator``; all ranks have this object, only rank 0 starts it."""

    def __init__(
        self, asked: Sequence[type[GeneralTracker] | GeneralTracker], project: ProjectConfiguration
    ) -> None:
        self.asked = asked
        self.trackers: list[GeneralTracker] = []
        # It is not in the list: scripts go through that, and warn of a tracker unknown to them.
        self.live = LiveTracker()
        self.is_started = False
        self._project = project
        self._finished: list[GeneralTracker] = []

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """The folder for the files of trackers, as the project's settings have it now."""
        return self._project.logging_dir

    def start(
        self,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, dict[str, Any]],
    ) -> None:
        """Finish earlier trackers, then make and start those that ``log_with`` asks for.

        Args:
            config: settings of the training, which each tracker stores; None stores none.
        """
        self.finish()
        self._finished, self.is_started = [], True
        self.trackers = []
        for one in self.asked:
            tracker: Any = one
            if isinstance(one, type):
                folder = [self.logging_dir] if one.requires_logging_directory else []
                # A user's own class takes what it likes: ours are all made like this.
                tracker = tracker(project_name, *folder, **init_kwargs.get(one.name, {}))
            tracker.start()
            # Only what has started is fed and finished.
            self.trackers.append(tracker)
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(dict(config))

    def finish(self) -> None:
        """Finish each tracker that is not finished yet, even if another tracker raises."""
        waiting = [one for one in self.trackers if one not in self._finished]
        self._finished += waiting
        with ExitStack() as stack:
            for tracker in waiting:
                stack.callback(tracker.finish)


class LiveTracker(GeneralTracker):
    """The tracker that is always there: it shows numbers live in the notebook.

    The run that the launcher returns has them as ``run.metrics``. In ranks that our launcher did
    not start, nothing is shown.
    """

    name = "notebook"
    requires_logging_directory = False

    @property
    def tracker(self) -> LiveTracker:
        """Return the tracker itself: there is no library behind it."""
        return self

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Show numbers in the notebook.

        A value that is no number is left out, with a notice the first time for each name.
        """
        found = numbers_of(values)
        if found:
            current().metric(found, step)
