"""Ranks and their devices; this file has ``ProcessInfo``, the base class of ``Accelerator``.

``ProcessInfo`` has this rank's index, world size and device, and methods that coordinate ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from notebook_accel.rank.this_rank import current
from notebook_accel.training.collectives import split_between
from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.processes import topology
from notebook_accel.training.settings.handlers import DistributedType

_Function = TypeVar("_Function", bound="Callable[..., Any]")


class ProcessInfo:
    """Base of ``PartialState``, ``AcceleratorState`` and ``Accelerator``: rank, world size, device.

    Its methods run code on one rank only or in turn, and divide inputs among the ranks.
    """

    @property
    def num_processes(self) -> int:
        """Number of ranks on all machines (the world size)."""
        return topology.topology().num_processes

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return topology.topology().process_index

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return topology.topology().local_process_index

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return topology.topology().device

    @property
    def distributed_type(self) -> DistributedType:
        """How the ranks train together, such as ``DistributedType.MULTI_CPU``."""
        return topology.topology().distributed_type

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have called this.

        Example:
            >>> from notebook_accel import PartialState
            >>> PartialState().wait_for_everyone()
        """
        topology.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run a ``with`` block on rank 0 first, then on the others; all ranks have to enter it.

        If the block raises on rank 0, the other ranks keep waiting, since they may need what the
        block on rank 0 makes, such as files.

        Example:
            >>> from notebook_accel import PartialState
            >>> with PartialState().main_process_first():
            ...     pass  # rank 0 downloads; the others find the files
        """
        yield from self._first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run a ``with`` block on the first rank of each machine first, then on the others.

        All ranks have to enter it.

        Example:
            >>> from notebook_accel import PartialState
            >>> with PartialState().local_main_process_first():
            ...     pass  # one rank of each machine downloads; the others find the files
        """
        yield from self._first(self.is_local_main_process)

    def _first(self, goes_first: bool) -> Iterator[None]:
        if not goes_first:
            self.wait_for_everyone()
        yield
        # An error on the way leaves the others waiting: what they need was not made.
        if goes_first:
            self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Return a context that gives each rank its share of ``inputs``: one contiguous part.

        If the shares cannot be equal, the first ranks get one item more. Ranks that hold one model
        together (tensor parallelism, pipelines) get the same share.

        Args:
            inputs: list, tuple, tensor or array (along the first dimension), a dataset with
                ``select``, or a mapping of these; anything else goes whole to every rank. It is
                not modified.
            apply_padding: whether to append the last item of ``inputs`` to the shorter shares, so
                that all shares have the same length.

        Raises:
            ValueError: the values of a mapping differ in length.

        Example:
            >>> from notebook_accel import PartialState
            >>> with PartialState().split_between_processes(["a", "b", "c"]) as share:
            ...     print(share)
            ['a', 'b', 'c']
        """
        shares = self._data_group
        yield split_between(inputs, shares.size, shares.index, apply_padding)

    @property
    def _data_group(self) -> DataGroup:
        """The share of the data that this rank gets: its index, and the number of shares.

        Both are those of the newest ``Accelerator``. Without an ``Accelerator`` each rank gets its
        own share.
        """
        shown: DataGroup | None = current().shared.get(DataGroup)
        return shown or DataGroup.of_all_ranks(self.num_processes, self.process_index)

    def on_main_process(self, function: _Function) -> _Function:
        """Decorate a function so that it runs on rank 0 only, and returns None elsewhere.

        Args:
            function: the function.

        Example:
            >>> from notebook_accel import PartialState
            >>> @PartialState().on_main_process
            ... def report():
            ...     return "done"
            >>> report()
            'done'
        """
        return self._only(function, lambda: self.is_main_process)  # type: ignore[no-any-return]

    def on_local_main_process(self, function: _Function) -> _Function:
        """Decorate a function so that it runs on the first rank of each machine only.

        Args:
            function: the function. On the other ranks a call returns None.

        Example:
            >>> from notebook_accel import PartialState
            >>> @PartialState().on_local_main_process
            ... def report():
            ...     return "done"
            >>> report()
            'done'
        """
        return self._only(function, lambda: self.is_local_main_process)  # type: ignore[no-any-return]

    def on_last_process(self, function: _Function) -> _Function:
        """Decorate a function so that it runs on the last rank only.

        Args:
            function: the function. On the other ranks a call returns None.

        Example:
            >>> from notebook_accel import PartialState
            >>> @PartialState().on_last_process
            ... def report():
            ...     return "done"
            >>> report()
            'done'
        """
        return self._only(function, lambda: self.is_last_process)  # type: ignore[no-any-return]

    def on_process(self, function: Any = None, process_index: int = 0) -> Any:
        """Decorate a function so that it runs on one rank only.

        If there is only one rank, it runs the function whatever ``process_index`` is.

        Args:
            function: the function. On the other ranks a call returns None. Leave it out to get a
                decorator, as in the example.
            process_index: the rank.

        Example:
            >>> from notebook_accel import PartialState
            >>> @PartialState().on_process(process_index=0)
            ... def report():
            ...     return "done"
            >>> report()
            'done'
        """
        return self._only(
            function, lambda: not self.use_distributed or self.process_index == process_index
        )

    def on_local_process(self, function: Any = None, local_process_index: int = 0) -> Any:
        """Decorate a function so that it runs on one rank of each machine only.

        If there is only one rank, it runs the function whatever ``local_process_index`` is.

        Args:
            function: the function. On the other ranks a call returns None. Leave it out to get a
                decorator, as in the example.
            local_process_index: the rank on its machine.

        Example:
            >>> from notebook_accel import PartialState
            >>> @PartialState().on_local_process(local_process_index=0)
            ... def report():
            ...     return "done"
            >>> report()
            'done'
        """
        return self._only(
            function,
            lambda: not self.use_distributed or self.local_process_index == local_process_index,
        )

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the first rank of each machine; do nothing on the other ranks.

        Args:
            *values: the values, as for Python's ``print``.
            **options: the options of Python's ``print``, such as ``end``.

        Example:
            >>> from notebook_accel import PartialState
            >>> PartialState().print("step", 1)
            step 1
        """
        if self.is_local_main_process:
            print(*values, **options)  # noqa: T201

    @staticmethod
    def _only(function: Any, is_the_one: Callable[[], bool]) -> Any:
        if function is None:
            return functools.partial(ProcessInfo._only, is_the_one=is_the_one)

        # Asked at the call: a decorated function may be older than the process group.
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_the_one() else None

        return run
