"""A notebook open in a real kernel, whose every process can be found."""

import ast
import os
import textwrap
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import psutil

from tests.engines.processes import marked
from tests.notebook.kernels import Kernel, Reply, open_kernel
from tests.waiting import eventually

MARK = "NOTEBOOK_ACCEL_TEST_MARK"
# Starting a kernel, a template, or anything else that imports torch on a busy machine: less than
# the limit of a test, which says less about what it waits for.
SLOW = 100.0


class Notebook:
    """Runs cells; knows which processes came of it."""

    def __init__(self, kernel: Kernel, mark: str) -> None:
        self.kernel = kernel
        self.manager = kernel.manager
        self.mark = mark

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def run(self, code: str, *, timeout: float = SLOW) -> str:
        """Run a cell that must end well; gives what it printed."""
        reply = self.finish(self.start(code), timeout=timeout)
        assert reply.status == "ok", "\n".join(reply.traceback)
        return reply.text

    def value(self, code: str) -> Any:
        """Run a cell that must end well; gives the value of its last expression, a literal."""
        reply = self.finish(self.start(code))
        assert reply.status == "ok", "\n".join(reply.traceback)
        return ast.literal_eval(reply.outputs[-1]["data"]["text/plain"])

    def shows(self, code: str) -> dict[str, Any]:
        """Run a cell that must end well; gives its one output with HTML, kept up to date."""
        reply = self.finish(self.start(code))
        assert reply.status == "ok", "\n".join(reply.traceback)
        (output,) = (one for one in reply.outputs if "text/html" in one["data"])
        return output

    def start(self, code: str) -> str:
        return self.kernel.start(textwrap.dedent(code))

    def finish(self, cell: str, *, timeout: float = SLOW) -> Reply:
        return self.kernel.finish(cell, timeout=timeout)

    def fails(self, code: str, *, timeout: float = SLOW) -> str:
        """Run a cell that must raise; gives its traceback."""
        reply = self.finish(self.start(code), timeout=timeout)
        assert reply.status == "error", reply.text
        return "\n".join(reply.traceback)

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def others(self, *but: int) -> list[psutil.Process]:
        return [p for p in marked(MARK, self.mark) if p.pid not in (self.pid, *but)]

    def expect(self, count: int, *, but: int, within: float) -> None:
        """Wait until no more than ``count`` of the others are left, ``but`` aside."""
        try:
            eventually(lambda: len(self.others(but)) <= count, within=within, what="they ended")
        except AssertionError:
            left = [f"{p.pid} of {p.ppid()}: {' '.join(p.cmdline())}" for p in self.others(but)]
            raise AssertionError(f"after {within} s there are still:\n" + "\n".join(left)) from None

    def end_all(self) -> None:
        for process in marked(MARK, self.mark):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        eventually(lambda: not marked(MARK, self.mark), within=SLOW, what="all is killed")


@contextmanager
def open_notebook(environment: Mapping[str, str] | None = None) -> Iterator[Notebook]:
    """A notebook for the time of the block; nothing of it is left afterwards."""
    mark = uuid.uuid4().hex
    with ExitStack() as stack:
        with patch.dict(os.environ, {**(environment or {}), MARK: mark}):
            kernel = stack.enter_context(open_kernel())
        notebook = Notebook(kernel, mark)
        stack.callback(notebook.end_all)
        yield notebook
