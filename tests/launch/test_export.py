"""An exported run is a script that torchrun runs: the notebook's own statements, and never data."""

import re
import subprocess
import sys
import textwrap
from os.path import join
from pathlib import Path

import pytest
import torch

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch.payload.cells import CellSource
from notebook_accel.launch.scripts import script_of

_README = Path(__file__).parents[2] / "README.md"


class Notebook:
    """Cells that have run, one after the other, and the script of a launch of `train` in them."""

    def __init__(self, *cells):
        self.names = {"__name__": "__main__", "notebook_launcher": _launch}
        self.sources = []
        for cell in cells:
            self.run(cell)

    def run(self, cell):
        text = textwrap.dedent(cell).strip("\n")
        self.sources.insert(0, CellSource(f"<{len(self.sources)}>", "Cell", text))
        _launch.arguments = (), {}
        exec(compile(text, f"<{len(self.sources)}>", "exec", dont_inherit=True), self.names)

    def script(self, *args, **kwargs):
        """The script of the newest launch, or of one with these arguments."""
        if not args and not kwargs:
            args, kwargs = _launch.arguments
        train = self.names["train"]
        return script_of(train, args, kwargs, world_size=2, file="it.py", sources=self.sources)


def _launch(_, args=(), num_processes=1, kwargs=None):
    _launch.arguments = args, kwargs or {}
    return [7]


_launch.__name__ = "notebook_launcher"


def returned(script, **names):
    """What the call at the end of a script gives."""
    names["__name__"] = "it"
    exec(compile(script, "it.py", "exec", dont_inherit=True), names)
    return eval(script.strip().splitlines()[-1].strip(), names)


def test_the_readmes_example_is_a_short_script():
    found = re.search(r"```python\n(import torch\n.*?)```", _README.read_text(), re.DOTALL)
    book = Notebook()
    text = found.group(1).replace("Accelerator, notebook_launcher", "Accelerator")
    book.run(text.replace("run[0]", "run"))
    script = book.script()
    assert script.endswith('\n\nif __name__ == "__main__":\n    train(0.01)\n')
    assert "images = images.float() / 16\n" in script
    assert "run" not in re.sub("torchrun|Run it", "", script)
    assert len(script) < 2000


@pytest.mark.timeout(300)
def test_torchrun_runs_it(tmp_path):
    book = Notebook(
        """
        import os
        import torch
        torch.manual_seed(3)
        table = torch.rand(2)
        """,
        "def train(b):\n    print(os.environ['WORLD_SIZE'], (table * b).tolist(), flush=True)",
        "notebook_launcher(train, (torch.tensor(2.0),), 2)",
    )
    (tmp_path / "it.py").write_text(book.script())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command += ["--redirects=3", f"--log-dir={tmp_path}", str(tmp_path / "it.py")]
    subprocess.run(command, check=True, timeout=280, capture_output=True)
    printed = [file.read_text() for file in tmp_path.glob("*/attempt_0/*/stdout.log")]
    assert printed == [f"2 {(book.names['table'] * 2).tolist()}\n"] * 2


def test_statements_come_in_their_order_and_the_newest_count():
    book = Notebook(
        "size = 1\ndef train(): return 'old'",
        "import math\nunused = open('/dev/null')\nscale = 2",
        "import math",
        """
        # Twice the size.
        def made(): return [scale * size]
        rows = made()
        """,
        "scale = 10",
        "rows.append(size)\nrows += [0]\nprint('unused')",
        "nothing = 5\nfor i in range(2): rows.append(i * scale)",
        "def train(): return rows, math.floor(scale), Last().n, shift(1)",
        """
        class Base: n = size + 1
        class Last(Base): pass
        shift = lambda x: x + step
        step = 3
        """,
        "size = 3",
        "size = 1",
        "run = notebook_launcher(train)\nrows = None",
    )
    book.names["rows"] = [2, 1, 0, 0, 10]
    script = book.script()
    assert returned(script) == ([2, 1, 0, 0, 10], 10, 2, 4)
    assert "# Twice the size.\ndef made" in script
    assert script.count("import math\n") == 1
    assert not [word for word in ("unused", "nothing", "'old'", "run =", "None") if word in script]


def test_what_no_statement_makes_is_loaded_by_a_line_that_says_so(tmp_path):
    book = Notebook(
        """
        import torch
        table = get() if False else torch.ones(2)
        best = notebook_launcher(abs)
        first = best[0] + 1
        """,
        "def train(given): return table.tolist(), first, found.tolist(), SIZE, path.name, given",
    )
    book.names |= {"found": torch.arange(3), "SIZE": 4, "path": tmp_path}
    script = book.script([1, {"a": 2.5}])
    line = 'found = torch.load("found.pt")  # save it in the notebook first: torch.save(found, '
    assert line in script
    assert 'first = torch.load("first.pt", weights_only=False)  # save it' in script
    assert "notebook_launcher(" not in script
    assert "SIZE = 4\n" in script
    assert "best" not in script
    for name in ("found", "first", "path", "table"):
        torch.save(book.names[name], tmp_path / f"{name}.pt")
    script = script.replace('torch.load("', f'torch.load("{tmp_path}/')
    assert returned(script) == ([1.0, 1.0], 8, [0, 1, 2], 4, tmp_path.name, [1, {"a": 2.5}])


def test_arguments_are_names_literals_or_what_the_launch_says():
    book = Notebook(
        "data = [*range(3000)]\nclass Box:\n    def __init__(self, n): self.n = n",
        "def train(*given, **named): return given[0][-1], given[1].n, named['class'], named['b'].n",
        "notebook_launcher(train, (data, Box(3)), 1, kwargs={'class': 'x', 'b': Box(4)})",
    )
    script = book.script()
    assert "    train(data, Box(3), b=Box(4), **{'class': 'x'})" in script.replace(
        "**{'class': 'x'}, b=Box(4)", "b=Box(4), **{'class': 'x'}"
    )
    assert len(script) < 600
    turned = script.replace("**{'class': 'x'}, b=Box(4)", "b=Box(4), **{'class': 'x'}")
    assert returned(turned) == (2999, 3, "x", 4)
    book.run("1")
    with pytest.raises(NotebookAccelError, match=r"`args\[0\]` \(Box\) has no name"):
        book.script(book.names["Box"](5))
    with pytest.raises(NotebookAccelError, match=r"`args\[0\]` \(list\) has no name"):
        book.script([0] * 100_000)


def test_functions_that_no_cell_defines():
    book = Notebook("def train(): return helper(), join('a', 'b')")
    exec("def helper(): return 1", book.names)

    book.names["join"] = join
    with pytest.raises(NotebookAccelError, match="`helper`, which the script needs, is not def"):
        book.script()
    book.run("def helper(): return 2")
    assert returned(book.script()) == (2, "a/b")


def test_a_function_of_a_program_that_the_notebook_has_run(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("import math\nsize = 3\n\n\ndef train():\n    return math.floor(size / 2)\n")
    book = Notebook("size = 4")
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), book.names)
    book.run("size = 9")
    assert returned(book.script()) == 4


def test_a_cell_that_ran_again_stands_once():
    helper = "def helper(x): return x * factor"
    book = Notebook("factor = 'old'", helper.replace("x *", "'old',"), "def train(): return rows")
    for cell in ("rows = [helper(1)]", helper, "factor = 2", "rows = helper(3); rows", "rows"):
        book.run(cell)
    script = book.script()
    assert returned(script) == 6
    assert "old" not in script
    assert "rows\n" not in script.split("def train")[0], "what a cell shows is left out"


def test_magics_and_cells_that_failed_are_left_out():
    book = Notebook("rows = []", "import math")
    for cell in (
        "rows.append(nowhere)",
        "%%bash\nls",
        "get_ipython().run_line_magic('matplotlib', 'inline')",
        "get_ipython().run_cell_magic('time', '', 'rows.append(math.floor(2.5))\\n')",
    ):
        book.sources.insert(0, CellSource("<cell>", "Cell", cell))
    book.run("def train(): return rows")
    script = book.script()
    assert returned(script) == [2]
    assert "nowhere" not in script
    assert "get_ipython" not in script
