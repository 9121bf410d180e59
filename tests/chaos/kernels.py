"""Real kernels to kill, one command at a time."""

import ast
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.kernel.notebooks import open_notebook

_ANSWER_SECONDS = 90.0


class Kernel:
    """A notebook from which runs are launched."""

    def __init__(self, environment: Mapping[str, str], cwd: Path) -> None:
        self.files = None
        self.commands = []
        self._cell = None
        self._stack = ExitStack()
        self._notebook = self._stack.enter_context(open_notebook(environment))
        self.pid, self.others = self._notebook.pid, self._notebook.others
        self._notebook.run(f"import os; os.chdir({str(cwd)!r})")
        self._notebook.run("from tests.chaos import cells")

    def send(self, command: str) -> None:
        assert self._cell is None
        self.commands.append(command)
        self._cell = self._notebook.start(f"print(repr({command}))")

    def answer(self) -> Any:
        assert self._cell is not None
        cell, self._cell = self._cell, None
        reply = self._notebook.finish(cell, timeout=_ANSWER_SECONDS)
        if "KeyboardInterrupt" in reply.text or reply.traceback:
            return "KeyboardInterrupt"
        return ast.literal_eval(reply.text)

    def ask(self, command: str) -> Any:
        self.send(command)
        return self.answer()

    def interrupt(self) -> None:
        self._notebook.interrupt()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        while psutil.pid_exists(self.pid) and self._notebook.manager.is_alive():
            time.sleep(0.005)

    def end(self) -> None:
        """End it as a person does."""
        self._notebook.manager.shutdown_kernel(now=False)

    def discard(self) -> None:
        """Leave nothing of it."""
        self._stack.close()

    def census(self) -> defaultdict[str, list[psutil.Process]]:
        """Return the processes by what they are."""
        parents = {}
        for process in self.others():
            with suppress(psutil.Error):
                parents[process] = process.ppid()
        agents = {process.pid for process in parents if self._is_agent(process)}
        templates = {process.pid for process, parent in parents.items() if parent == self.pid}
        found = defaultdict(list)
        for process, parent in parents.items():
            if process.pid in templates:
                kind = "template"
            elif process.pid in agents:
                kind = "agent"
            elif parent in agents:
                kind = "rank"
            else:
                kind = "prepared" if parent in templates else "worker"
            found[kind].append(process)
        return found

    def _is_agent(self, process: psutil.Process) -> bool:
        try:
            is_leader = os.getsid(process.pid) == process.pid
            return is_leader and process.ppid() != self.pid and "serve(" in process.cmdline()[-1]
        except (psutil.Error, OSError, IndexError):
            return False
