from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from ipykernel.compiler import XCachingCompiler
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from notebook_accel.launch.control.export import script_of
from notebook_accel.notebook.failed_cells import watch_cells
from notebook_accel.notebook.origins import origins_of_launch
from notebook_accel.notebook.sources import cell_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_accel.launch.control.export import Origin, Origins


def accelerate(line: str, cell: str = "") -> None:
    """As the magic does, keep the cell's own text beside what IPython made of it."""
    shell: Any = get_ipython()
    shell.compile.cache(f"%%accelerate {line}\n{cell}", len(shell.user_ns["In"]) - 1)


class Notebook:
    """Cells that run here, and in which launches start nothing."""

    def __init__(self) -> None:
        config = Config(HistoryManager={"enabled": False})
        # As a kernel does, it names cells by their text.
        self.shell: Any = InteractiveShell.instance(config=config, compiler_class=XCachingCompiler)
        watch_cells(self.shell)
        self.shell.register_magic_function(accelerate, "line_cell")
        self.launches: list[Callable[[], Origins]] = []
        self.shell.user_ns["notebook_launcher"] = self._launch
        self.run(
            "class Net:\n    def __init__(self, width=1): self.parts = [width]",
            "class Learns(Net):\n    state_dict = dict",
            "def train(*args, **kwargs): ...\ndef make(n=2): return [object()] * n",
        )

    def _launch(self, function: Any, args: Any = (), **options: Any) -> None:
        self.launches.append(origins_of_launch(self.shell, function))

    def run(self, *cells: str) -> None:
        for cell in cells:
            self.shell.run_cell(cell, store_history=True)

    def text_of_global(self, name: str) -> str | None:
        origins = origins_of_launch(self.shell, print)()
        return text_of(origins.of_global(name, self.shell.user_ns[name]))

    def script(self) -> str:
        """The script of ``train()`` that is exported now."""
        shell = self.shell
        origins = origins_of_launch(shell, print)()
        sources = cell_sources(shell)
        train = shell.user_ns["train"]
        return script_of(
            train, (), {}, world_size=1, file="it.py", sources=sources, origins=origins
        )

    def result_of_script(self) -> Any:
        """What ``train()`` gives in that script."""
        names: dict[str, Any] = {"__name__": "it"}
        exec(compile(self.script(), "it.py", "exec", dont_inherit=True), names)
        return names["train"]()

    def text_of_argument(self, launch: int, key: int | str) -> str | None:
        return text_of(self.launches[launch]().of_argument(key))


def text_of(origin: Origin | None) -> str | None:
    return None if origin is None else origin.text


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    main = sys.modules["__main__"]
    yield Notebook()
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        (["it = make()"], "it = make()"),
        (["n = 1; it, other = make(\n  n), 2", "print(it)"], "it, other = make(\n  n), 2"),
        (["it = 1", "it = lambda x: x"], "it = lambda x: x"),
        (["n = 1", "it = make(n)", "n = 2"], None),
        (["it = make()", "it = 1 / 0"], None),
        (["it = make()", "it = list(it)"], None),
        (["it = make()", "it[0] = 1"], None),
        (["it = make()", "it.reverse()"], None),
        (["it = make()", "%time it.reverse()"], None),
        (["it = make()", "%%accelerate -n 2\nit.reverse()"], "it = make()"),
        (["it = make()", "%accelerate pull it"], None),
        (["it, other = make(), make()", "other.reverse()"], None),
        (["it = make()", "def make(): ..."], None),
        (["for it in make(): pass"], None),
        (["async def later(): return []", "it = await later()"], None),
        (["it = Net()", "other = it.parts"], "it = Net()"),
        # Of what learns, any use counts but these.
        (["it = Learns()", "other = it.parts"], None),
        (["it = Learns()", "print(fit(it))"], None),
        (["it = Learns()", "fit({'net': it})"], None),
        (["it = Learns()", "[p.zero_() for p in it.parts]"], None),
        (["it = Learns()", "it(1), 3"], None),
        (["it = Learns()", "sum(p.numel() for p in it.parameters())"], "it = Learns()"),
        (["it = make()", "last = it.pop()"], None),
        (["n = 2; it = dict(make=n).setdefault(1, n)"], "it = dict(make=n).setdefault(1, n)"),
        (["it = make()", "last = len(it)", "print(it.index(it[0]))"], "it = make()"),
        (
            ["it = Learns()", "print(it)\nit", "run = notebook_launcher(train, (it,))"],
            "it = Learns()",
        ),
    ],
)
def test_a_global_has_the_statement_that_would_make_it_again(
    notebook: Notebook, cells: list[str], text: str | None
) -> None:
    notebook.run(*cells)
    assert notebook.text_of_global("it") == text


def test_an_argument_has_its_expression_where_it_would_give_the_same(notebook: Notebook) -> None:
    width = "width = object()"
    launch = "run = notebook_launcher(train, (1, Net(width)), kwargs={'net': Net(\n7)})"
    notebook.run(width, launch, "notebook_launcher(function=train, args=[Net()])")
    assert notebook.text_of_argument(0, 1) == "Net(width)"
    assert notebook.text_of_argument(0, "net") == "Net(\n7)"
    assert notebook.text_of_argument(0, "other") is None
    assert notebook.text_of_argument(1, 0) == "Net()"
    notebook.run(width, launch)
    assert notebook.text_of_argument(0, 1) is None, "it was another one then"
    assert notebook.text_of_argument(0, "net") == "Net(\n7)"
    assert notebook.text_of_argument(2, 1) == "Net(width)"


def test_a_launch_that_no_statement_makes_by_itself_has_no_expressions(notebook: Notebook) -> None:
    notebook.run(
        "for n in (1, 2): notebook_launcher(train, (Net(n),))",
        "[notebook_launcher(train, (Net(n),)) for n in (1, 2)]",
        "def go(): notebook_launcher(train, (Net(),))",
        "go()",
        "both = notebook_launcher(train, (Net(),)), notebook_launcher(train, (Net(2),))",
        "notebook_launcher(train, (*[Net()],), kwargs={**{'net': 2}, 'net': Net()})",
    )
    assert len(notebook.launches) == 8
    for launch in range(8):
        assert notebook.text_of_argument(launch, 0) is None
        assert notebook.text_of_argument(launch, "net") is None


def test_the_seed_is_the_newest_before_the_launch(notebook: Notebook) -> None:
    notebook.run(
        "def set_seed(n): ...\nSEED = 3",
        "set_seed(0)",
        "set_seed(SEED)\nrun = notebook_launcher(train, (Net(),))\nset_seed(4)",
    )
    assert text_of(notebook.launches[0]().of_seed()) == "set_seed(SEED)"
    notebook.run("SEED = 5")
    assert notebook.launches[0]().of_seed() is None, "nor an older one, which was not in force"


def test_what_a_class_or_function_was_given_after_its_statement_is_in_the_script(
    notebook: Notebook,
) -> None:
    notebook.run(
        """class Node:
    limit, rows, kinds = 3, [], {}
    def __init__(self): self.n = Node.limit
    def f(self): return 1
    def same(self): return 2
class Leaf(Node):
    begun = list(Node.kinds)""",
        """def train():
    found = node.n, node.f(), Node.f(node), Node.h(node), node.same(), Node.rows
    return *found, Node.kinds == {'leaf': Leaf}, Leaf.begun, train.lr""",
        "def plus(self): return self.n + WIDTH\nWIDTH = 40",
        "Node.f = plus\nNode.limit += 2; Node.rows.append(1)",
        "if WIDTH:\n    setattr(Node, 'h', lambda self: WIDTH)",
        "Node.kinds['leaf'] = Leaf\ntrain.lr = 3",
        "node = Node()",
        "node.same(); Node.same(node)",
    )
    known = notebook.shell.user_ns["train"]()
    assert known == (5, 45, 45, 40, 2, [1], True, [], 3)
    assert notebook.result_of_script() == known


def test_parts_of_packages_that_cells_import_are_imported(notebook: Notebook) -> None:
    notebook.run(
        "import importlib.machinery, wsgiref.util\nfrom xml import dom",
        "%xmode Plain\nimport wsgiref, xml.sax.saxutils",
        "def train(): return wsgiref.util.guess_scheme({}), xml.sax.saxutils.escape('<'), dom",
    )
    text = notebook.script()
    for line in ("import wsgiref.util\n", "import xml.sax.saxutils\n"):
        assert line in text
    assert "importlib" not in text
    assert "import wsgiref\n" not in text


def test_annotations_are_kept_as_text_where_a_cell_says_so(notebook: Notebook) -> None:
    notebook.run(
        "from dataclasses import dataclass, fields",
        "class Part: ...",
        "@dataclass\nclass Config:\n    n: int = 0\n    part: Part | None = None",
        "def train(given: Config | None = None):\n    return [one.type for one in fields(Config)]",
    )
    assert notebook.result_of_script()[0] is int
    assert "__future__" not in notebook.script()
    # As ran twice, the second time with a word on the other.
    notebook.run("class Part:\n    def of(self) -> Config: ...")
    assert "__future__" in notebook.script()
    notebook.run("from __future__ import annotations", "class Part: ...")
    assert "__future__" in notebook.script()
