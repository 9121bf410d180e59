"""Real kernels, of several versions of ipykernel, driven as a page drives them."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import port_names
from jupyter_client.manager import AsyncKernelManager, KernelManager
from jupyter_client.session import Session

from tests.ports import free_port
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
INSTALLED = "installed"
OTHERS = ("6.31.0", "7.3.0")
# Each line of ipykernel that people run, oldest first; the first is Colab's.
MATRIX = ("6.17.1", "6.29.5", "6.31.0", "7.0.1", "7.3.0", "7.4.0")
# A training that draws a bar, logs and prints, and one that lasts until a file is there; for the
# first cell of a notebook.
TRAIN = """
def train(steps):
    from tqdm.auto import tqdm
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    for step in tqdm(range(steps), desc="train"):
        accelerator.log({"loss": 1 / (step + 1)}, step=step)
    print("done on", accelerator.process_index)
    return accelerator.process_index
def train_until(file, steps):
    import pathlib, time
    result = train(steps)
    while not pathlib.Path(file).exists():
        time.sleep(0.01)
    return result
"""
# What Colab pins beside its ipykernel, and what these need that newer ones do not.
_PINNED_BESIDE = {
    "6.17.1": (
        "ipython==7.34.0",
        "ipywidgets==7.7.1",
        "widgetsnbextension==3.6.10",
        "ipython-genutils==0.2.0",
        "backcall==0.2.0",
        "pickleshare==0.7.5",
    )
}


def overlay(version: str) -> Path | None:
    """A folder with ipykernel ``version`` and its pins, made if missing; None for the installed."""
    if version == INSTALLED:
        return None
    folder = ROOT / ".overlays" / f"ipykernel-{version}"
    if not (folder / "ipykernel").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        packages = [f"ipykernel=={version}", *_PINNED_BESIDE.get(version, ())]
        target = ["--target", str(folder), *packages]
        subprocess.run([*command, *target], check=True, timeout=300)
    return folder


def kernel_environment(version: str) -> dict[str, str]:
    folders = [folder for folder in (overlay(version), ROOT) if folder is not None]
    return {"PYTHONPATH": os.pathsep.join(map(str, folders))}


class PageSession(Session):
    """Numbers messages as pages do; by its own numbers the package knows Jupyter's client."""

    @property
    def msg_id(self) -> str:
        return str(uuid.uuid4())


@dataclass
class Reply:
    """What a cell did, as a page has it at the end; ``outputs`` with updates applied."""

    status: str = ""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    traceback: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """A message; ``when`` it was made: what waited for a test process would come all at once."""

    when: float
    kind: str
    size: int


class Kernel:
    """A kernel and its client.

    Attributes:
        first: what outputs held when they were first shown.
        updates: what took the place of that, each time.
        buttons: the id of each button's comm, by its text; of equal ones the newest.
        models: the state of each widget, by the id of its comm.
        strays: the types of what a page was to draw while no cell ran.
        has_subshells: whether a page can talk to the kernel while a cell blocks it.
    """

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client
        self.seen: list[Seen] = []
        self.first: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.displays: dict[str, dict[str, Any]] = {}
        self.buttons: dict[str, str] = {}
        self.widgets: deque[str] = deque(maxlen=20)
        self.models: dict[str, dict[str, Any]] = {}
        self.strays: list[str] = []
        self._running: set[str] = set()
        self._ended: set[str] = set()
        self._subshell: str | None = None
        self._told_states = False
        reply = client.kernel_info(reply=True, timeout=60)
        features = reply["content"].get("supported_features", [])
        self.has_subshells = "kernel subshells" in features

    def run(self, code: str, *, timeout: float = 60, allow_stdin: bool = True) -> Reply:
        return self.finish(self.start(code, allow_stdin=allow_stdin), timeout=timeout)

    def start(self, code: str, *, allow_stdin: bool = True) -> str:
        return str(self.client.execute(code, allow_stdin=allow_stdin))

    def finish(self, message_id: str, *, timeout: float = 60) -> Reply:
        """Give what a cell does from now on until its end, which may have come meanwhile.

        A kernel that says nothing by then ends with the stacks of its threads.
        """
        reply = Reply(status="ok")
        deadline = time.monotonic() + timeout
        while message_id not in self._ended:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                self.manager.signal_kernel(signal.SIGABRT)
                eventually(lambda: not self.manager.is_alive(), within=10, what="the kernel ended")
                raise
            is_own = message["parent_header"].get("msg_id") == message_id
            self._take(message, reply if is_own else Reply())
        return reply

    def train_with_panel(self, folder: Path, *, timeout: float = 60) -> tuple[Reply, str]:
        """Train until the panel was seen; return the reply, and the summary's HTML."""
        self.displays.clear()
        go_on = folder / "go on"
        launch = f"run = notebook_launcher(train_until, ({str(go_on)!r}, 20), num_processes=2)"
        cell = self.start(launch)
        self.wait_for_panel(seconds=timeout)
        go_on.touch()
        reply = self.finish(cell, timeout=timeout)
        (summary,) = self.displays.values()
        assert set(summary["data"]) == {"text/html", "text/plain"}
        return reply, summary["data"]["text/html"]

    @property
    def shows_panel(self) -> bool:
        view = "application/vnd.jupyter.widget-view+json"
        return any(view in output["data"] for output in self.displays.values())

    def wait_for_panel(self, *, seconds: float = 60) -> None:
        """On ipykernel 7.4 a click before the panel goes to the main shell, and waits there."""
        assert self.listen_until(lambda: self.shows_panel, seconds=seconds), "no panel is shown"

    def click(self, text: str, *, by_subshell: bool = True) -> None:
        """Click by a subshell if there is one, as JupyterLab; else as a page that knows none."""
        assert self.shows_panel, "a page has no button of a panel that it does not show"
        # Before the run begins, as long as a kernel's first launch takes, a panel has none.
        assert self.listen_until(lambda: text in self.buttons, seconds=60), f"no button {text}"
        data = {"method": "custom", "content": {"event": "click"}}
        content = {"comm_id": self.buttons[text], "data": data}
        self._send("comm_msg", content, by_subshell=by_subshell)

    def fill(self, label: str, value: str | bool | float) -> None:
        """Fill in the newest field of that label, as a page tells it; of a list, choose."""
        comm_id, model = next(
            (comm_id, model)
            for comm_id, model in reversed(self.models.items())
            if model.get("description") == label
        )
        labels = model.get("_options_labels")
        state = {"value": value} if labels is None else {"index": [*labels].index(value)}
        data = {"method": "update", "state": state, "buffer_paths": []}
        self._send("comm_msg", {"comm_id": comm_id, "data": data}, by_subshell=True)

    def reload(self) -> None:
        """Be a new page, which asks for all widgets; until the kernel has told them."""
        session = self.client.session
        session.session = str(uuid.uuid4())
        self.displays.clear()
        self.models.clear()
        opened = {"comm_id": session.session, "target_name": "jupyter.widget.control", "data": {}}
        message = session.msg("comm_open", opened, metadata={"version": "1.0.0"})
        self.client.shell_channel.send(message)
        asked = {"comm_id": session.session, "data": {"method": "request_states"}}
        self._send("comm_msg", asked, by_subshell=False)
        # What the kernel says meanwhile may come before its answer, which has all states.
        self._told_states = False
        assert self.listen_until(lambda: self._told_states, seconds=30)

    def answers_new_page(self, *, seconds: float) -> bool:
        return self.answers(self.client.kernel_info(), seconds=seconds)

    def answers(self, asked: str, *, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while left := max(0.0, deadline - time.monotonic()):
                reply = self.client.get_shell_msg(timeout=left)
                if reply["parent_header"].get("msg_id") == asked:
                    return True
        return False

    def _send(self, kind: str, content: dict[str, Any], *, by_subshell: bool) -> None:
        """Send what a widget says; by the one subshell that a page has for all widgets."""
        message = self.client.session.msg(kind, content)
        if by_subshell and self.has_subshells:
            if self._subshell is None:
                control = self.client.control_channel
                control.send(self.client.session.msg("create_subshell_request", {}))
                self._subshell = str(control.get_msg(timeout=60)["content"]["subshell_id"])
            message["header"]["subshell_id"] = self._subshell
        self.client.shell_channel.send(message)

    def listen_until(self, condition: Callable[[], bool], *, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._take(self.client.get_iopub_msg(timeout=0.05), Reply())
        return condition()

    def _note_strays(self, message: dict[str, Any]) -> None:
        """Note what is no part of the answer to a cell, or to a click, that is still handled."""
        parent, state = message["parent_header"], message["content"].get("execution_state")
        if parent.get("msg_id") and state is not None:
            change = self._running.add if state == "busy" else self._running.discard
            change(parent["msg_id"])
            if state == "idle":
                self._ended.add(parent["msg_id"])
        is_drawn = message["msg_type"].startswith(("comm_", "display_data", "update_display"))
        if is_drawn and parent.get("msg_id") not in self._running:
            self.strays.append(message["msg_type"])

    def _take(self, message: dict[str, Any], reply: Reply) -> None:
        kind, content = message["msg_type"], message["content"]
        size = len(json.dumps(content, default=str))
        self.seen.append(Seen(message["header"]["date"].timestamp(), kind, size))
        self._note_strays(message)
        if kind == "stream":
            reply.text += content["text"]
        elif kind in ("display_data", "execute_result"):
            output = {"data": content["data"]}
            self.first.append(content["data"])
            reply.outputs.append(output)
            display = content.get("transient", {}).get("display_id")
            if display is not None:
                self.displays[display] = output
        elif kind == "update_display_data":
            display = content["transient"]["display_id"]
            self.updates.append(content["data"])
            self.displays.get(display, {})["data"] = content["data"]
        elif kind in ("comm_open", "comm_msg"):
            self._told_states |= "states" in content["data"]
            for comm_id, told in content["data"].get("states", {}).items():
                self.models.setdefault(comm_id, {}).update(told["state"])
            state = content["data"].get("state", {})
            self.widgets.append(str(state.get("value")))
            self.models.setdefault(content["comm_id"], {}).update(state)
            if state.get("_model_name") == "ButtonModel":
                self.buttons[state["description"]] = content["comm_id"]
        elif kind == "error":
            reply.traceback = content["traceback"]
            reply.status = "error"


class Console(Kernel):
    """A client that draws a display once, and none of its updates."""

    def _take(self, message: dict[str, Any], reply: Reply) -> None:
        if message["msg_type"] != "update_display_data":
            super()._take(message, reply)


class VSCode(Kernel):
    """A client that draws what VS Code does: updates of displays only if they answer a cell."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        super().__init__(manager, client)
        self._cells: set[str] = set()

    def start(self, code: str, *, allow_stdin: bool = True) -> str:
        cell = super().start(code, allow_stdin=allow_stdin)
        self._cells.add(cell)
        return cell

    def ask_hidden(self) -> None:
        asked = self.client.execute("1", silent=True, store_history=False, allow_stdin=False)
        assert self.answers(asked, seconds=30)

    def _take(self, message: dict[str, Any], reply: Reply) -> None:
        is_update = message["msg_type"] == "update_display_data"
        if not is_update or message["parent_header"].get("msg_id") in self._cells:
            super()._take(message, reply)


def choose_ports(manager: KernelManager) -> None:
    """Choose the ports of its kernel.

    Those that it would choose are soon given to another test's process, and the kernel that comes
    to them a second later dies of that.
    """
    manager.cache_ports = False
    for name in port_names:
        setattr(manager, name, free_port())


class AsyncManager(AsyncKernelManager):
    """For nbclient, which makes its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        choose_ports(self)


@contextmanager
def kernel_manager(**options: Any) -> Iterator[KernelManager]:
    """One that ends its kernel."""
    manager = KernelManager(**options)
    choose_ports(manager)
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


@contextmanager
def open_kernel(
    version: str = INSTALLED, page: type[Kernel] = Kernel, session: type[Session] = PageSession
) -> Iterator[Kernel]:
    environment = {**os.environ, **kernel_environment(version), "PYTHONFAULTHANDLER": "1"}
    with kernel_manager() as manager:
        manager.start_kernel(env=environment, cwd=str(ROOT))
        client = manager.blocking_client()
        client.session = session(key=manager.session.key)
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            yield page(manager, client)
        finally:
            client.stop_channels()
