from __future__ import annotations

from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from notebook_accel.errors import ConfigError
from notebook_accel.notebook.cell_script import LeftOut, script_of_cell


def script(text: str, *inputs: str, **changes: Any) -> str:
    given: dict[str, Any] = {
        "number": len(inputs) + 1,
        "inputs": ["", *inputs],
        "session_cells": {},
        "left_out": {},
        "failed": (),
        "namespace": (),
        "transform": TransformerManager().transform_cell,
        "world_size": 2,
        "mixed_precision": None,
        "file": "train.py",
    }
    return script_of_cell(text, **{**given, **changes})


def ran(text: str) -> dict[str, Any]:
    """The names of a script that has run."""
    names: dict[str, Any] = {}
    exec(compile(text, "it.py", "exec", dont_inherit=True), names)
    return names


def test_a_script_has_the_cells_that_are_needed_and_no_others() -> None:
    text = script("use(b)\n", "import math", "a = math.pi", "c = 1", "b = a", "def use(x): ...")
    assert text.startswith('"""Cell In[6] of a notebook')
    labels = [line[7:] for line in text.splitlines() if line.startswith("# ----")]
    assert labels == ["In[1]", "In[2]", "In[4]", "In[5]", "In[6]"]
    assert text.endswith("print(use(b))\n")
    assert "Accelerator" not in text


def test_the_newest_cell_that_assigns_a_name_counts() -> None:
    text = script("print(a)", "a = 1", "a = 2", "a += 1")
    assert "a = 1" not in text
    assert text.index("a = 2") < text.index("a += 1")
    # It may not run: the one before it stays.
    text = script("print(a)", "fast = 1", "a = 1", "a = 2", "if fast: a = 3")
    assert "a = 1" not in text
    assert text.index("fast = 1") < text.index("a = 2") < text.index("if fast: a = 3")
    text = script("x", "try:\n    import x\nexcept ImportError:\n    x = 0", namespace=["x"])
    assert "import x" in text


def test_names_that_a_star_imports_are_those_of_the_module() -> None:
    text = script("print(sqrt(pi))", "from math import *", "x = 1", namespace=["pi", "sqrt", "x"])
    assert "from math import *" in text
    assert "x = 1" not in text
    assert "math" not in script("print(x)", "from math import *", "x = 1")


def test_a_cell_that_is_only_timed_is_there_without_its_magic() -> None:
    text = script(
        "%%time\nprint(a)", "b = 2", "%%time\na = b", "%%bash\na = 3", namespace=["a", "b"]
    )
    assert text.index("b = 2") < text.index("a = b") < text.index("print(a)")
    assert "%" not in text
    assert "a = 3" not in text


def test_a_last_line_of_several_statements_is_kept() -> None:
    assert script("'é'; x = 2; x * 3").endswith("\n'é'; x = 2\nprint(x * 3)\n")
    assert script("x = '''a\nb'''; (x,\n 1)").endswith("x = '''a\nb'''\nprint((x,\n 1))\n")
    assert script("x = '\f'\nx").endswith("x = '\f'\nprint(x)\n")


@pytest.mark.parametrize(
    "cell",
    [
        "cfg['lr'] = 1",
        "cfg['lr'] += 1",
        "del cfg['lr']",
        "if cfg:\n    model.layers[0].bias = None",
        "model.eval()",
        "_ = model.to('cpu').eval()",
        "freeze(model)",
        "freeze(1, layers=[model.layers[0], *model.children()])",
        "setattr(model, 'bias', None)",
        "init.zeros_(model.weight)",
        "for p in model.parameters():\n    p.requires_grad = False",
        "for layer in model:\n    for _, p in zip('ab', layer):\n        p.zero_()",
        "print(fit(model))",
        "fit(model), 3",
        "f'{model.fit(rows)}'",
        "[p.requires_grad_(False) for p in model.parameters()]",
        "{p: q.zero_() for p in 'ab' for q in model}",
        "last = cfg.pop()",
        "res: object = model.load_state_dict(rows)",
        "total = 1 + next(cfg)",
        "from somewhere import set_seed\nset_seed(1)",
        "import os\nos.environ['A'] = '1'",
    ],
)
def test_a_cell_that_may_change_what_is_needed_is_there(cell: str) -> None:
    inputs = ["cfg = {}\nmodel = 1", "pass", cell]
    text = script("use(model, cfg);", *inputs)
    assert text.index("# ---- In[1]\n") < text.index(cell) < text.index("use(model, cfg);")
    assert "# ---- In[2]" not in text
    text = script("use(model, cfg);", *inputs, failed=[1, 3])
    assert "In[1]" in text
    assert "In[3]" not in text
    if "import" not in cell:
        text = script("use(model, cfg);", *inputs, "cfg = 2\nmodel = 3")
        assert "In[3]" not in text, "what it changed has another value by now"


@pytest.mark.parametrize(
    "cell",
    [
        "rows.append(model)",
        "rows[model] = cfg",
        "print(model)",
        "sum(p.numel() for p in model.parameters())",
        "model(rows)",
        "print(fit(rows), len(model.parameters()), cfg.items())",
        "[rows.append(p) for p in model.parameters()]",
        "[print(p.mean()) for p in model.parameters()]",
        "model.state_dict()",
        "later(lambda: fit(model))",
        "batch = model.forward(cfg)",
        "for p in model.parameters():\n    print(p)",
        "def later():\n    model.eval()",
        "notebook_launcher(train, (model, cfg), num_processes=2)",
        "notebook_accel.notebook_launcher(train, (model, cfg))",
        "seed = 1",
        "%matplotlib inline",
    ],
)
def test_a_cell_that_changes_nothing_that_is_needed_is_left_out(cell: str) -> None:
    assert "In[2]" not in script("use(model, cfg);", "cfg = {}\nmodel = 1", cell)


def test_names_that_are_at_hand_in_a_session_are_made() -> None:
    text = script("rank, device", mixed_precision="bf16")
    assert "accelerator = Accelerator(mixed_precision='bf16')\nrank = " in text
    assert "world_size" not in text
    assert text.endswith("print((rank, device))\n")


def test_a_name_that_is_at_hand_hides_the_notebooks_from_before_the_session() -> None:
    text = script("there + rank, device", "device = 'mine'", "there = device", "rank = 7")
    assert text.index("device = 'mine'") < text.index("there = device")
    assert text.index("there = device") < text.index("device = accelerator.device")
    assert "rank = 7" not in text
    cells = {1: "pass"}
    text = script("rank", "%%accelerate\npass", "rank = 7", session_cells=cells)
    assert "rank = 7" in text


def test_lines_of_ipython_are_left_out_and_future_imports_come_first() -> None:
    text = script("if 1:\n    !ls\na = 1;", "from __future__ import annotations\nx = 1")
    assert "    pass  # left out: !ls\n" in text
    text = script("x", "from __future__ import (\n    annotations)\nx = 1")
    assert text.count("__future__") == 1


def test_a_remainder_beside_a_line_of_ipython_is_kept() -> None:
    text = script("!ls\na = 7 % 3\na")
    assert "pass  # left out: !ls\na = 7 % 3\nprint(a)\n" in text


def test_cells_of_the_session_are_all_there() -> None:
    cells = {1: "model = 1", 2: "model_is_trained_by(model)"}
    text = script("model", "%%accelerate\nmodel = 1", "%%accelerate", session_cells=cells)
    assert "model_is_trained_by(model)" in text


def test_what_no_cell_makes_is_named() -> None:
    with pytest.raises(ConfigError, match="no cell of this notebook assigns `found`"):
        script("found", namespace=["found"])
    left_out = {1: LeftOut("data = 1; 1 / 0", "did not end well")}
    with pytest.raises(ConfigError, match=r"`data` is assigned by In\[1\], which did not end well"):
        script("data", "%%accelerate\n", left_out=left_out)
    assert "data = 2" in script("data", "%%accelerate\n", "data = 2", left_out=left_out)
    with pytest.raises(ConfigError, match=r"at `await it\(\);`: a cell can have what a script"):
        script("await it();")


def test_what_a_failed_cell_assigns_may_be_assigned_anew() -> None:
    left_out = {1: LeftOut("model = 4\noops", "did not end well")}
    for own in (
        "model = 5",
        "if 1:\n    model = 5\nelse:\n    model = 6",
        "for model in [5]: pass",
    ):
        cell = f"def train(model):\n    return model\n{own}\nfound = train(model)"
        assert ran(script(cell, "%%accelerate\n", left_out=left_out))["found"] == 5


def test_a_cell_that_reads_what_a_failed_one_assigned_is_left_out() -> None:
    left_out = {1: LeftOut("data = [1]\noops", "did not end well")}
    cells = {2: "print(data)\nn = len(data)", 3: "m = n", 4: "data = [1, 2]", 5: "k = len(data)"}
    inputs = [f"%%accelerate\n{cells.get(number, '')}" for number in range(1, 6)]
    text = script("found = data, k", *inputs, left_out=left_out, session_cells=cells)
    assert ran(text)["found"] == ([1, 2], 2)
    assert "# ---- In[2]\n# Left out: it uses `data` of In[1].\n" in text
    assert "# ---- In[3]\n# Left out: it uses `n` of In[2].\n" in text
    with pytest.raises(
        ConfigError, match=r"`n` is assigned by In\[2\], which uses `data` of In\[1\]"
    ):
        script("found = n", *inputs, left_out=left_out, session_cells=cells)
    cells[2] = "model = k = 1\nmodel.fit(data)"
    with pytest.raises(
        ConfigError, match=r"In\[2\] uses `data` of In\[1\], which is left out; `%acc"
    ):
        script("found = data, k", *inputs, left_out=left_out, session_cells=cells)


def test_a_statement_that_a_magic_times_is_there() -> None:
    timed = "%time rows.append(1)\nif rows:\n    %prun -l 3 rows\n    %time n = 2; m = 3"
    text = script("%time rows.append(n)\nfound = rows\n%timeit rows.append(5)", "rows = []", timed)
    assert ran(text)["found"] == [1, 2]
    assert "    pass  # left out: %prun -l 3 rows\n" in text
    assert text.endswith("pass  # left out: %timeit rows.append(5)\n")
    assert "In[2]" in script("rows", "rows = []", "%time rows.append(1)")


def test_texts_that_look_like_lines_of_ipython_are_kept() -> None:
    text = script("%cd ..\nfound = '''\n!ls\n%time\nwhat?\n'''\n!ls \\\n -a\nfound??")
    assert ran(text)["found"] == "\n!ls\n%time\nwhat?\n"
    assert text.count("pass  # left out: ") == 3
    assert "left out: found?" in text
    with pytest.raises(ConfigError, match="at `files = !ls`"):
        script("files", "files = !ls")


def test_a_part_of_a_package_is_imported_though_the_package_is_imported_later() -> None:
    imports = ["import wsgiref.util", "%cd .\nimport xml.dom.minidom", "x = 1", "import wsgiref"]
    text = script("wsgiref.util, xml", *imports, "import xml")
    for line in ("import wsgiref.util", "import xml.dom.minidom"):
        assert f"{line}\n" in text
    assert "x = 1" not in text
    assert "In[1]" in script("import wsgiref\nwsgiref.util", "import wsgiref.util")
    assert "In[1]" not in script("wsgiref", "import wsgiref.util", "wsgiref = 3")


def test_annotations_are_kept_as_text_where_a_cell_says_so() -> None:
    cell = "class A:\n    n: int\nfound = A.__annotations__['n']"
    text = script(cell, "x = 1")
    assert ran(text)["found"] is int
    assert "__future__" not in text
    for said in ("from __future__ import annotations", "%cd .\nfrom __future__ import annotations"):
        assert ran(script(cell, said))["found"] == "int"
        assert ran(script(f"{said}\n{cell}", "x = 1"))["found"] == "int"
    line = "'é'; from __future__ import annotations, division ; import math; k = 1 # all"
    text = script(f"{line}\nfound = math.floor(k)")
    assert ran(text)["found"] == 1
    assert "\nfrom __future__ import annotations, division\n" in text
