"""What a tracker is: the contract that ``Accelerator`` and users' own classes share.

A tracker takes the numbers of a training to where they are kept. ``Accelerator`` makes it, calls
``start`` once, ``store_init_configuration`` if there are settings, ``log`` again and again, and
``finish``; all of it on the main process alone. The functions at the end bring what is logged to
what trackers take: Python numbers by flat names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import numbers
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from notebook_accel.training.processes import topology
from notebook_accel.training.settings.environment import is_installed
from notebook_accel.training.settings.notices import notice_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "BlankTracker",
    "GeneralTracker",
    "LibraryTracker",
    "as_number",
    "flatten",
    "numbers_of",
    "on_main_process",
    "with_numbers",
]

_Function = TypeVar("_Function", bound="Callable[..., Any]")


class GeneralTracker:
    """Base class of all trackers, also of your own.

    A subclass has ``name``, ``requires_logging_directory`` and ``tracker`` (an attribute or a
    property). It overrides ``log`` and whatever else it keeps.

    Attributes:
        name: name by which ``log_with`` and ``get_tracker`` find it.
        requires_logging_directory: whether it writes files. If so, it is made with the folder as
            its second argument.
        main_process_only: whether methods under ``on_main_process`` run on rank 0 only.

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
            """The library's own object behind it."""

    def __init__(self, _blank: bool = False) -> None:
        """Check that the class has what it needs.

        Args:
            _blank: for the tracker of ranks that do not track.

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
        """Begin a run of the library; called once, on the main process."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the settings of the training."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers of a step."""

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images of a step: for each name the images, as arrays or of PIL."""
        notice_once(f"images {self.name}", f"the tracker {self.name!r} keeps no images")

    def finish(self) -> None:
        """Write what is not written yet."""


class BlankTracker(GeneralTracker):
    """Takes everything and keeps nothing: a tracker of the ranks that don't track.

    So that scripts which log on every rank need no branch.
    """

    name = "blank"
    requires_logging_directory = False

    @property
    def tracker(self) -> None:
        """Return None: no library is behind it."""

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep nothing."""

    def log_table(self, *args: Any, **kwargs: Any) -> None:
        """Keep nothing."""


class LibraryTracker(GeneralTracker):
    """Base of the trackers that hand over to a library, which is imported as a run begins.

    Each gives its ``tracker`` under the name that Accelerate has for it, too: ``writer``, say.

    Attributes:
        module: what is imported.
        package: what ``pip install`` calls it.
    """

    module: ClassVar[str]
    package: ClassVar[str]
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        """Keep what ``start`` will need.

        Args:
            run_name: the project's name.
            **kwargs: for the library's own start: ``init_kwargs={name: {...}}``.
        """
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._run: Any = None

    @property
    def tracker(self) -> Any:
        """The library's own object of this run; None before ``start``."""
        return self._run

    @classmethod
    def is_available(cls) -> bool:
        """Whether the library is installed."""
        return is_installed(cls.module)

    @classmethod
    def library(cls) -> Any:
        """The imported library."""
        return importlib.import_module(cls.module)


def on_main_process(function: _Function) -> _Function:
    """Decorate a tracker's method so that it does nothing on ranks other than 0.

    Args:
        function: the method; a tracker with ``main_process_only = False`` runs it on all ranks.
    """

    @functools.wraps(function)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        everywhere = not getattr(self, "main_process_only", False)
        if everywhere or topology.topology().process_index == 0:
            return function(self, *args, **kwargs)
        return None

    return called  # type: ignore[return-value]


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values by name; those of a dictionary are named "key/inner key"."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{name}/")
        else:
            yield name, value


def as_number(value: Any) -> float | None:
    """The number in a Python number, or in a tensor or array of one number; else None."""
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    if isinstance(value, numbers.Real):
        return float(value)
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        item = value.item()
        return float(item) if isinstance(item, numbers.Real) else None
    return None


def numbers_of(values: Mapping[str, Any], tracker: str = "") -> dict[str, float]:
    """The numbers among ``values``, by flat names; what is none is named once and left out.

    Args:
        values: Python numbers, tensors and arrays of one number, or dictionaries of them.
        tracker: the one that keeps them; "" for the run itself, which shows them.
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
    """The values as they are, tensors and arrays of one number as that number.

    For libraries that take images, tables and more among the numbers.
    """
    ready: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            ready[name] = with_numbers(value)
        else:
            number = None if isinstance(value, (bool, int, float)) else as_number(value)
            ready[name] = value if number is None else number
    return ready
