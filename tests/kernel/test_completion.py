"""What a page asks the kernel while a person types: what Tab offers, and what ``?`` shows."""

import pytest

OPTIONS = """
--help --num-processes --ranks --fresh --bg --pull --each-rank
--push --no-push --write --mixed-precision --config
"""
PRECISIONS = {"no", "bf16", "fp16", "fp8"}


def offered(notebook, text):
    """What Tab offers where ``|`` stands in a cell."""
    before, _, after = text.partition("|")
    reply = notebook.kernel.client.complete(before + after, len(before), reply=True, timeout=60)
    start, matches = reply["content"]["cursor_start"], reply["content"]["matches"]
    # A match replaces what stands between the start and the cursor: all of it begins like that.
    assert all(match.startswith(before[start:]) for match in matches)
    return set(matches)


@pytest.mark.parametrize("jedi", ["as it is", pytest.param("off", marks=pytest.mark.long)])
def test_tab_offers_what_the_magic_takes_and_a_question_mark_shows_each_setting(notebook, jedi):
    if jedi == "off":
        notebook.run("%config IPCompleter.use_jedi = False")
    notebook.run("%load_ext notebook_accel\nlearning_rate = 1")
    notebook.run("%%accelerate -n 1\nmodel = mean_loss = 1")
    assert offered(notebook, "%%accelerate --|\nx = 1") == {*OPTIONS.split()}
    assert offered(notebook, "%%accelerate -n 2 --p|") == {"--pull", "--push"}
    assert offered(notebook, "%%accelerate --mixed-precision |\nx = 1") == PRECISIONS
    assert offered(notebook, "%%accelerate --mixed-precision=f|") == {"fp16", "fp8"}
    assert offered(notebook, "%accelerate restart --mixed-precision |") == PRECISIONS
    assert offered(notebook, "%accelerate st|") == {"start", "stop", "status", "stacks"}
    assert {"pull", "--help"} <= offered(notebook, "%accelerate |")
    assert offered(notebook, "x = 1\n%accelerate pull m|") == {"model", "mean_loss"}
    assert offered(notebook, "%accelerate pull model,me|") == {"mean_loss"}
    assert "mean_loss" in offered(notebook, "%accelerate pull --rank 0 |")
    assert offered(notebook, "%%accelerate --pull model,me|\nmodel") == {"mean_loss"}
    assert offered(notebook, "%accelerate push lea|") == {"learning_rate"}
    assert offered(notebook, "%%accelerate --push lea|\n1") == {"learning_rate"}
    assert "learning_rate" in offered(notebook, "%%accelerate --pull model\nlea|"), "code is Python"
    notebook.run("from notebook_accel import LaunchConfig")
    reply = notebook.kernel.client.inspect("LaunchConfig", reply=True, timeout=60)
    text = reply["content"]["data"]["text/plain"]
    assert "grace: float = 10.0\n        Seconds that ranks get to leave" in text
