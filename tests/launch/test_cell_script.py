import math

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from notebook_accel.errors import ConfigError
from notebook_accel.launch.scripts import script_of_cells


def script(*cells, **changes):
    given = {
        "namespace": {},
        "sources": [],
        "transform": TransformerManager().transform_cell,
        "world_size": 2,
        "mixed_precision": None,
        "file": "train.py",
    }
    return script_of_cells(dict(enumerate(cells, start=1)), **{**given, **changes})


def ran(text):
    """The names of a script that has run."""
    names = {"__name__": "it"}
    exec(compile(text, "it.py", "exec", dont_inherit=True), names)
    return names


def test_a_script_has_the_cells_in_their_order():
    text = script("a = 1", "a += 1\nb = [a]", "b.append(a)\nb")
    assert text.startswith('"""In[3], exported from a notebook.')
    labels = [line[7:] for line in text.splitlines() if line.startswith("# ----")]
    assert labels == ["In[1]", "In[2]", "In[3]"]
    assert text.endswith("print(b)\n")
    assert "Accelerator" not in text
    assert ran(text)["b"] == [2, 2]


def test_what_the_cells_use_of_the_notebook_is_there():
    namespace = {"math": math, "sqrt": math.sqrt, "size": 3, "made": {1}, "size2": 4, "own": 5}
    text = script("own = made", "math.floor(sqrt(size)), own", namespace=namespace)
    assert "import math\n" in text
    assert "from math import sqrt\n" in text
    assert "size = 3\n" in text
    assert "size2" not in text
    assert "own = 5" not in text
    assert ran(text)["own"] == {1}
    text = script("len(data)", namespace={"data": b"x" * 1_500})
    assert 'data = torch.load("data.pt", weights_only=False)  # save it' in text
    text = script(
        "table", sources=["table.append(1)", "import math\ntable = [0]"], namespace={"table": 1}
    )
    assert ran(text)["table"] == [0, 1]
    assert "math" not in text


def test_what_a_cell_of_the_session_finds_there_is_made():
    text = script("x = rank", "display(x, accelerator)", mixed_precision="bf16")
    assert "accelerator = Accelerator(mixed_precision='bf16')\n" in text
    assert text.index("from IPython.display import display") < text.index("rank = accelerator.proc")
    assert "device" not in text


def test_lines_of_ipython_are_left_out():
    text = script(
        "%matplotlib inline\na = 1", "%%time\nb = a", "from __future__ import annotations\nb"
    )
    assert "# left out: %matplotlib inline\na = 1\n" in text
    assert ran(text)["b"] == 1
    for cell in ("%time fit(model)", "files = !ls", "%run it.py"):
        with pytest.raises(ConfigError, match=r"In\[1\] has a line of IPython"):
            script(cell, "1")


def test_the_value_of_the_cell_is_printed():
    assert script("x = 2\n(x,\n 3)").endswith("x = 2\nprint((x, 3))\n")
    assert script("max(1,\n 3)").endswith("\nprint(max(1,\n 3))\n")
    assert script("print(1)").endswith("\nprint(1)\n")
    assert script("1;").endswith("\n1;\n")


def test_what_no_script_can_have_is_refused():
    with pytest.raises(ConfigError, match=r"train\.py: 'await' outside function, at `await f\(\)`"):
        script("await f()\n1")
