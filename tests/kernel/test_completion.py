"""What a page asks the kernel while a person types: what Tab offers, and what ``?`` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.kernel.notebooks import Notebook


def offered(notebook: Notebook, text: str) -> set[str]:
    """What Tab offers where ``|`` stands in a cell."""
    before, _, after = text.partition("|")
    reply = notebook.kernel.client.complete(before + after, len(before), reply=True, timeout=60)
    return set(reply["content"]["matches"])


def test_tab_offers_the_names_of_the_session(notebook: Notebook) -> None:
    notebook.run("%load_ext notebook_accel\nlearning_rate = 1")
    notebook.run("%%accelerate -n 1\nmodel = mean_loss = 1")
    assert {"model", "mean_loss"} <= offered(notebook, "x = 1\n%accelerate pull m|")
    assert "mean_loss" in offered(notebook, "%%accelerate --pull model,me|\nmodel")
    assert "learning_rate" in offered(notebook, "%%accelerate --push lea|\n1")


def test_a_question_mark_shows_each_setting(notebook: Notebook) -> None:
    notebook.run("from notebook_accel import LaunchConfig")
    reply = notebook.kernel.client.inspect("LaunchConfig", reply=True, timeout=60)
    text = reply["content"]["data"]["text/plain"]
    assert "grace: float = 10.0\n        Seconds that ranks get to leave" in text
