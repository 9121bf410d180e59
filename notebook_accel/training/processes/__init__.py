"""What a rank knows of its place and does with the others: the same for all that show it."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

from notebook_accel.training.collectives import split_between
from notebook_accel.training.collectives.data_group import DataGroup, current_data_group
from notebook_accel.training.processes import topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from notebook_accel.training.settings.handlers import DistributedType

__all__ = ["ProcessInfo"]

_Function = TypeVar("_Function", bound="Callable[..., Any]")


class ProcessInfo:
    """Base of ``PartialState``, ``AcceleratorState`` and ``Accelerator``."""

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
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
        """Where this rank computes."""
        return topology.topology().device

    @property
    def distributed_type(self) -> DistributedType:
        """How the ranks belong together."""
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
        """Wait until all ranks are here."""
        topology.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block first; the others wait until it is through."""
        yield from self._first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first rank of each machine runs the block first; the others wait."""
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
        """Give each rank its share of ``inputs``, in order; the first ranks take one more.

        Ranks that hold one model together (tensor parallelism, pipelines) get the same share.

        Args:
            inputs: list, tuple, tensor or array (along its first dimension), a dataset with
                ``select``, or a dictionary of such. They stay as they are.
            apply_padding: repeat the last item until all shares are as long as the longest.

        Raises:
            ValueError: the values of a dictionary differ in length.
        """
        shares = self._data_group
        yield split_between(inputs, shares.size, shares.index, apply_padding)

    @property
    def _data_group(self) -> DataGroup:
        """Who gets which share."""
        shown = current_data_group()
        return shown or DataGroup.of_all_ranks(self.num_processes, self.process_index)

    def on_main_process(self, function: _Function) -> _Function:
        """Decorator: the function runs on rank 0 and gives None elsewhere."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: _Function) -> _Function:
        """Decorator: the function runs on the first rank of each machine."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: _Function) -> _Function:
        """Decorator: the function runs on the last rank."""
        return self._only(function, lambda: self.is_last_process)

    @overload
    def on_process(self, function: _Function, process_index: int) -> _Function: ...
    @overload
    def on_process(
        self, function: None = None, *, process_index: int
    ) -> Callable[[_Function], _Function]: ...
    def on_process(self, function: Any = None, process_index: int = 0) -> Any:
        """Decorator: the function runs on the rank of this index; where there is one rank alone,
        on that one, whatever the index is."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only(
            function, lambda: not self.use_distributed or self.process_index == process_index
        )

    @overload
    def on_local_process(self, function: _Function, local_process_index: int) -> _Function: ...
    @overload
    def on_local_process(
        self, function: None = None, *, local_process_index: int
    ) -> Callable[[_Function], _Function]: ...
    def on_local_process(self, function: Any = None, local_process_index: int = 0) -> Any:
        """Decorator: the function runs on the ranks of this index on their machine; where there is
        one rank alone, on that one, whatever the index is."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(
            function,
            lambda: not self.use_distributed or self.local_process_index == local_process_index,
        )

    def print(self, *values: Any, **options: Any) -> None:
        """``print`` on the first rank of each machine."""
        if self.is_local_main_process:
            print(*values, **options)  # noqa: T201

    @staticmethod
    def _only(function: _Function, is_the_one: Callable[[], bool]) -> _Function:
        # Asked at the call: a decorated function may be older than the process group.
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_the_one() else None

        return run  # type: ignore[return-value]
