"""Kernels to kill: plain Python processes, since they are quick, and real ones."""

import ast
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.engines.processes import marked
from tests.kernel.notebooks import MARK, Notebook, open_notebook

ROOT = Path(__file__).parents[2]
_ANSWER_SECONDS = 90.0
# As in a real kernel, an interrupt hits a command once, and never what is between two.
_LOOP = """
import json, signal, sys
from tests.chaos import cells
at_work = False

def interrupt(number, frame):
    global at_work
    if at_work:
        at_work = False
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    try:
        at_work = True
        answer = eval(line)
        at_work = False
    except KeyboardInterrupt:
        answer = "KeyboardInterrupt"
    print(json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Census:
    template: list[psutil.Process]
    prepared: list[psutil.Process]
    agent: list[psutil.Process]
    rank: list[psutil.Process]
    worker: list[psutil.Process]


class Kernel(ABC):
    """A process from which runs are launched, one command at a time."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.waits = False
        self.files: Counter[str] | None = None
        self.commands: list[str] = []

    @property
    @abstractmethod
    def pid(self) -> int:
        """Of its process."""

    def send(self, command: str) -> None:
        assert not self.waits
        self.commands.append(command)
        self.waits = True
        self._send(command)

    def answer(self) -> Any:
        self.waits = False
        return self._answer()

    def ask(self, command: str) -> Any:
        self.send(command)
        return self.answer()

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def others(self) -> list[psutil.Process]:
        return [process for process in marked(MARK, self.mark) if process.pid != self.pid]

    def census(self) -> Census:
        kinds = ("template", "prepared", "agent", "rank", "worker")
        found: dict[str, list[psutil.Process]] = {kind: [] for kind in kinds}
        others = self.others()
        agents = {process.pid for process in others if self._is_agent(process)}
        for process in others:
            found[self._role(process, agents)].append(process)
        templates = {process.pid for process in found["template"]}
        for process in [*found["worker"]]:
            with suppress(psutil.Error):
                if process.ppid() in templates:
                    found["worker"].remove(process)
                    found["prepared"].append(process)
        return Census(**found)

    def _is_agent(self, process: psutil.Process) -> bool:
        try:
            is_leader = os.getsid(process.pid) == process.pid
            return is_leader and process.ppid() != self.pid and "serve(" in process.cmdline()[-1]
        except (psutil.Error, OSError, IndexError):
            return False

    def _role(self, process: psutil.Process, agents: set[int]) -> str:
        try:
            parent = process.ppid()
        except psutil.Error:
            return "worker"
        if parent == self.pid:
            return "template"
        if process.pid in agents:
            return "agent"
        return "rank" if parent in agents else "worker"

    @abstractmethod
    def _send(self, command: str) -> None: ...

    @abstractmethod
    def _answer(self) -> Any: ...

    @abstractmethod
    def close(self) -> None:
        """End it as a person does."""


class Plain(Kernel):
    def __init__(self, environment: Mapping[str, str], cwd: Path) -> None:
        super().__init__()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LOOP],
            env={**environment, MARK: self.mark, "PYTHONPATH": str(ROOT)},
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.waits = True
        assert self.answer() == "ready"

    @property
    def pid(self) -> int:
        return self._process.pid

    def _send(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(_ANSWER_SECONDS):
                raise TimeoutError(f"no answer to {self.commands[-1:]} in {_ANSWER_SECONDS} s")
        line = self._process.stdout.readline()
        if not line.strip():
            raise OSError(f"{line!r} came from the kernel, which ended by {self._process.poll()}")
        return json.loads(line)

    def kill(self) -> None:
        super().kill()
        self._process.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_ANSWER_SECONDS)


class Real(Kernel):
    def __init__(self, environment: Mapping[str, str], cwd: Path) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._notebook: Notebook = self._stack.enter_context(open_notebook(environment))
        self.mark = self._notebook.mark
        self._cell = ""
        self._notebook.run(f"import os; os.chdir({str(cwd)!r})")
        self._notebook.run("from tests.chaos import cells")

    @property
    def pid(self) -> int:
        return self._notebook.pid

    def _send(self, command: str) -> None:
        self._cell = self._notebook.start(f"print(repr({command}))")

    def _answer(self) -> Any:
        reply = self._notebook.finish(self._cell, timeout=_ANSWER_SECONDS)
        if "KeyboardInterrupt" in reply.text or reply.traceback:
            return "KeyboardInterrupt"
        return ast.literal_eval(reply.text)

    def interrupt(self) -> None:
        self._notebook.interrupt()

    def kill(self) -> None:
        super().kill()
        while psutil.pid_exists(self.pid) and self._notebook.manager.is_alive():
            time.sleep(0.005)

    def close(self) -> None:
        self._notebook.manager.shutdown_kernel(now=False)
        self._stack.close()
