import json
import sys
from types import SimpleNamespace

import pytest
import zmq
from jupyter_client.session import Session
from tornado.queues import Queue

from notebook_accel.notebook.clicks import (
    ClicksAfterTheCell,
    ClicksByPump,
    ClicksBySubshell,
    ClicksInColab,
    clicks_for,
)


class OldKernel:
    """What ipykernel 6 has that matters here."""

    def __init__(self):
        self.msg_queue = Queue()
        self.shell_stream = SimpleNamespace(flush=lambda: None)
        self.session = Session(key=b"")
        self.handled = []
        self.states = []
        self.shell_handlers = {
            "comm_msg": self.handle,
            "comm_close": self.handle,
            "kernel_info_request": self.answer,
        }

    def handle(self, stream, identities, message):
        assert stream is self.shell_stream
        self.handled.append(message["content"]["name"])
        if message["content"]["name"] == "bad":
            raise KeyboardInterrupt

    async def answer(self, stream, identities, message):
        self.handle(stream, identities, message)

    def get_parent(self, channel):
        return channel

    def _publish_status(self, state, channel, parent):
        self.states.append(state)

    def send(self, kind, name):
        frames = map(zmq.Frame, self.session.serialize(self.session.msg(kind, {"name": name})))
        self.msg_queue.put_nowait((self.msg_queue.qsize(), None, ([*frames],)))

    @property
    def waiting(self):
        contents = (frames[-1].bytes for _, _, (frames,) in self.msg_queue._queue)
        return [json.loads(content)["name"] for content in contents]


class NewKernel:
    """What ipykernel 7 has that matters here: a thread takes messages in, without the cell."""

    shell_channel_thread = object()


@pytest.mark.parametrize(
    ("kernel", "way"),
    [
        (NewKernel(), ClicksBySubshell),
        (SimpleNamespace(_supports_kernel_subshells=False), ClicksAfterTheCell),
        (OldKernel(), ClicksByPump),
        (SimpleNamespace(config={}), ClicksAfterTheCell),
        (None, ClicksAfterTheCell),
    ],
)
def test_each_kernel_has_its_way(kernel, way):
    assert type(clicks_for(kernel)) is way


def test_colabs_kernel_is_known_by_its_shell(monkeypatch):
    # Kaggle's image has it as well.
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    assert type(clicks_for(OldKernel())) is ClicksByPump
    shell = type("Shell", (), {"__module__": "google.colab._shell"})()
    kernel = OldKernel()
    kernel.shell = shell
    assert type(clicks_for(kernel)) is ClicksInColab


def test_the_pump_handles_clicks_leaves_cells_in_their_order_and_loses_nothing_at_an_interrupt():
    kernel = OldKernel()
    for kind, name in (
        ("execute_request", "cell 1"),
        ("comm_msg", "click"),
        ("execute_request", "cell 2"),
        ("kernel_info_request", "question"),
        ("comm_msg", "bad"),
        ("comm_close", "closed"),
        ("shutdown_request", "cell 3"),
    ):
        kernel.send(kind, name)
    with pytest.raises(KeyboardInterrupt):
        ClicksByPump(kernel).pump()
    assert kernel.waiting == ["cell 1", "cell 2", "closed", "cell 3"]
    ClicksByPump(kernel).pump()
    assert kernel.handled == ["click", "question", "bad", "closed"]
    assert kernel.waiting == ["cell 1", "cell 2", "cell 3"]
    assert kernel.states == ["idle", "busy"] * 3
