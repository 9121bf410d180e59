"""An exported run is a script that torchrun runs, readable where it can be."""

from __future__ import annotations

import linecache
import math
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch.control.export import script_of

if TYPE_CHECKING:
    from pathlib import Path

_SECONDS = 280.0

# Executed as __main__, with its source in a file, as a notebook's cells have it in linecache.
_NOTEBOOK = """
import math
import os
from dataclasses import dataclass
import torch
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.launcher import launch
from notebook_accel.launch.request import LaunchRequest

SIZE = 4
TABLE = torch.arange(3)
shift = lambda x: x + 1

@dataclass
class Box:
    n: int = 0

    def twice(self):
        return self.n * 2 * SIZE

class Big(Box):
    def thrice(self):
        return helper(self.n)

def helper(x):
    return x * 3 + int(TABLE.sum())

def train(a, b=1):
    box = Big(a)
    text = f"{box.twice()} {box.thrice()} {shift(math.floor(b))}"
    print(text, "of", os.environ["WORLD_SIZE"])
    return text

if __name__ == "__main__":
    config = LaunchConfig(num_processes=2, devices="cpu")
    run = launch(LaunchRequest(function=train, args=(2,), kwargs={"b": 2.5}, config=config))
    run.export(os.environ["TARGETS"] + "/exported.py")
    print(run[0])
"""

# After it in the same process: cells of a shell, where ``inspect`` finds no source of a class.
_CELLS = """
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

CELLS = '''
%load_ext notebook_accel
#---
class M:
    size = 1
#---
class M:
    size = 2
#---
class M:
    size = 1
#---
class N:
    def f(self):
        return BASE
BASE = 3
#---
from dataclasses import dataclass
@dataclass
class D(N):
    n: int = 0
#---
import os
import torch
from torch.nn import Linear
from notebook_accel import Accelerator, notebook_launcher
class Net(torch.nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return Linear(1, M.size)(x)
SIDE = 3
TABLE, LIMIT = torch.arange(SIDE), torch.tensor(SIDE)
shift = lambda x: x + int(LIMIT)
layer = Linear(2, 1)
repr(layer);
#---
def train(given, side):
    known = [Accelerator.__name__, M.size, N().f(), D(4).f(), Net()(torch.zeros(1)).shape[0]]
    print(*known, shift(int(TABLE.sum())), int(side.sum()), layer(given.weight).item())
#---
torch.manual_seed(3)
layer = Linear(2, 1)
run = notebook_launcher(
    train, (Linear(2, 1),), 1, kwargs={"side": torch.ones(SIDE)}, devices="cpu", view="none"
)
folder = os.environ["TARGETS"]
run.export(folder + "/cells.py")
with open(folder + "/printed", "w") as file:
    file.write(run.logs(0))
#---
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(7)
samples = torch.randn(64, 4)
wanted = samples.sum(1, keepdim=True)
#---
def fit(rate):
    torch.manual_seed(1)
    accelerator = Accelerator()
    model = Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = DataLoader(TensorDataset(samples, wanted), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    print(accelerator.process_index, accelerator.num_processes, losses)
#---
run = notebook_launcher(fit, (0.1,), 2, devices="cpu", view="none")
run.export(folder + "/training.py")
with open(folder + "/losses", "w") as file:
    file.write(run.logs(0) + run.logs(1))
'''
shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
for cell in CELLS.split("#---"):
    assert shell.run_cell(cell, store_history=True).success, cell
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the notebook has exported its file and its cells."""
    folder = tmp_path_factory.mktemp("exported")
    notebook = folder / "notebook.py"
    notebook.write_text(_NOTEBOOK + _CELLS)
    said = _run(sys.executable, str(notebook), TARGETS=str(folder))
    assert said == "16 9 3\n"
    return folder


# Three processes import torch here, at the priority of whatever else the machine does.
@pytest.mark.long
@pytest.mark.timeout(600)
def test_torchrun_runs_what_was_exported(folder: Path) -> None:
    text = (folder / "exported.py").read_text()
    assert "class Box:\n    n: int = 0" in text
    assert "SIZE = 4" in text
    assert "torchrun --nproc_per_node=2 exported.py" in text
    assert _by_torchrun(folder / "exported.py") == ["16 9 3 of 2\n"] * 2


@pytest.mark.timeout(600)
@pytest.mark.long
def test_an_exported_training_takes_the_same_steps(folder: Path) -> None:
    said = _by_torchrun(folder / "training.py", ACCELERATE_USE_CPU="true")
    in_the_notebook = (folder / "losses").read_text()
    assert len(in_the_notebook.splitlines()) == 2
    assert "".join(sorted(said)) == in_the_notebook


def _by_torchrun(script: Path, **variables: str) -> list[str]:
    """What each rank prints."""
    # Each into a file of its own: torchrun runs them unbuffered, so that the parts of what two
    # ranks print at the same time come mixed.
    logs = script.with_suffix(".logs")
    to_files = ("--redirects=3", f"--log-dir={logs}")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *to_files)
    _run(sys.executable, *torchrun, str(script), **variables)
    return [file.read_text() for file in logs.glob("*/attempt_0/*/stdout.log")]


def test_what_a_notebooks_cells_made_is_copied_as_source(folder: Path) -> None:
    text = (folder / "cells.py").read_text()
    assert "class M:\n    size = 1\n" in text
    assert "@dataclass\nclass D(N):" in text
    assert (
        text.index("class N:")
        < text.index("class D(N):")
        < text.index("class Net(")
        < text.index("def train(")
    )
    assert "from notebook_accel.training.accelerator import Accelerator\n" in text
    assert "TABLE = _pickled['TABLE']\n" in text
    assert "    train(_pickled['args[0]'], side=_pickled[\"kwargs['side']\"])\n" in text
    printed = (folder / "printed").read_text()
    assert printed.startswith("Accelerator 1 3 3 1 6 3 ")
    assert _run(sys.executable, str(folder / "cells.py")) == printed


def _function(text: str, **names: Any) -> Any:
    """The function ``train`` that a cell of this text defines, beside globals of those names."""
    text = textwrap.dedent(text)
    file = f"<cell {hash(text)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names["__name__"] = "__main__"
    exec(compile(text, file, "exec"), names)
    return names["train"]


def test_only_what_the_code_reads_as_globals_is_exported(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        train = _function(
            """
            def train(a):
                x, n = 1, a
                def inner(p):
                    t = depth
                    return p + n + t
                q = [w + step for w in range(2)]
                class Box:
                    k = 1
                    j = k
                return inner(x), q, Box, sum(i * scale for i in q)
            """,
            **dict.fromkeys(["x", "n", "p", "t", "q", "w", "k", "j", "i", "a", "inner"], file),
            depth=1,
            step=2,
            scale=3,
            unused=4,
        )
        text = script_of(train, (5,), {}, world_size=2, file="it.py")
        names = {"__name__": "it"}
        exec(text, names)
        assert {"depth", "step", "scale", "train"} < names.keys()
        assert not {"x", "n", "p", "w", "k", "unused", "_pickled"} & names.keys()

        train = _function("def train(b=1):\n    log.write('x')", log=file)
        with pytest.raises(NotebookAccelError, match=r"`log` \(TextIOWrapper\) .* Make it inside"):
            script_of(train, (), {}, world_size=2, file="it.py")
        train = _function("def train(b): pass")
        with pytest.raises(NotebookAccelError, match=r"`kwargs\['b'\]` \(TextIOWrapper\) cannot"):
            script_of(train, (), {"b": file}, world_size=2, file="it.py")


class HalfMade:
    """As an object whose ``__init__`` raised: its text needs what is not there."""

    def __repr__(self) -> str:
        return str(self.size)  # type: ignore[attr-defined]


class Settings(dict[str, float]):
    def __getattr__(self, name: str) -> float:  # and dict's own text
        if name not in self:
            raise AttributeError(name)  # pickle of Python 3.10 looks for more than it has
        return self[name]


def test_what_has_no_text_of_its_own_is_no_plain_value() -> None:
    train = _function("def train(a): pass")
    for value in (HalfMade(), Settings(lr=0.1), [{"a": Settings(lr=0.1)}]):
        assert "_pickled" in script_of(train, (value,), {}, world_size=2, file="it.py")
    assert "_pickled" not in script_of(train, ([{"a": (1, {2.0})}],), {}, world_size=2, file="it")


def test_keyword_arguments_of_any_name() -> None:
    train = _function("def train(**options):\n    return options")
    given = {"lr": 0.1, "weight-decay": 0.0, "class": 3}
    text = script_of(train, (), given, world_size=1, file="it.py")
    call = text.strip().splitlines()[-1].strip()
    names: dict[str, Any] = {"__name__": "it"}
    exec(text, names)
    assert eval(call, names) == given


def test_a_definition_comes_after_what_its_own_statement_uses() -> None:
    train = _function(
        """
        import textwrap
        SIZE = 3
        KNOWN = []
        class Zed:
            def __init__(self):
                self.size = double(SIZE)
        def double(x):
            return 2 * x
        class Alone:
            zeds = [Zed() for _ in range(2)]
            cut = textwrap.shorten
            def width(self) -> Later:
                return Later().size + math.floor(1.5)
        def reg(function, last=Alone()):
            def unused():
                return Later
            return function
        @reg
        class Later(Zed):
            def more(self):
                return self.size
        @reg
        def train(*, zed=Zed()):
            return zed.size, Alone().width(), Alone.cut("a b", 5)
        """,
        math=math,
    )
    text = script_of(train, (), {}, world_size=2, file="it.py")
    names: dict[str, Any] = {"__name__": "it"}
    exec(text, names)
    assert names["train"]() == train() == (6, 7, "a b")
    assert "_pickled" not in text


def _result(text: str) -> Any:
    """What the call at the end of a script gives."""
    names: dict[str, Any] = {"__name__": "it"}
    exec(text, names)
    return eval(text.strip().splitlines()[-1].strip(), names)


def _make_loss(weight: float) -> Any:
    def train() -> float:
        return weight

    return train


def test_functions_of_one_name_stay_different_ones() -> None:
    train = _function("def train(*parts): return [part() for part in parts]")
    parts = (_make_loss(1.0), _function("def train(): return 2.0"), _make_loss(3.0))
    assert _result(script_of(train, parts, {}, world_size=1, file="it.py")) == [1.0, 2.0, 3.0]


def test_two_things_of_one_name_are_refused() -> None:
    train = _function("def train(*parts): return SIZE, [part() for part in parts]", SIZE=1)
    size = _function("def train(): return size()\ndef size(): return SIZE", SIZE=2)
    with pytest.raises(NotebookAccelError, match="`SIZE` is the name of two things"):
        script_of(train, (size.__globals__["size"],), {}, world_size=1, file="it.py")


def test_large_values_are_refused_by_name() -> None:
    train = _function("def train(b=1):\n    return X", X=torch.zeros(300_000))
    with pytest.raises(NotebookAccelError, match=r"`X` \(Tensor\) is larger than the 1 MB"):
        script_of(train, (), {}, world_size=2, file="it.py")
    with pytest.raises(NotebookAccelError, match=r"`args\[0\]` \(list\) is larger"):
        script_of(_function("def train(b): pass"), ([0] * 500_000,), {}, world_size=2, file="it.py")


def test_pickled_values_are_of_the_classes_of_the_script() -> None:
    train = _function(
        """
        import enum
        class Mode(enum.Enum):
            TRAIN = 1
            def text(self):
                return str(self)
        class Config:
            def __init__(self):
                self.part = 1
        class Last:
            default = [Config()][0]
            def width(self):
                return self.default
        def train(mode, config):
            kinds = isinstance(config, Config), isinstance(Last().width(), Config)
            return mode is Mode.TRAIN, kinds, config.step()
        """,
    )
    known = train.__globals__
    exec("def make(n): return lambda: type(config) is Config and n", known)
    known["config"] = known["Config"]()
    known["config"].step = known["make"](5)
    text = script_of(train, (known["Mode"].TRAIN, known["config"]), {}, world_size=1, file="it.py")
    assert _result(text) == (True, (True, True), 5)


def test_pickled_values_share_what_they_share_in_the_notebook() -> None:
    train = _function(
        """
        class Model:
            def __init__(self):
                self.weight = [0]
        def train(model, weights):
            return model is MODEL, weights[0] is model.weight, weights[1] is OTHER
        """
    )
    known = train.__globals__
    known["OTHER"], known["MODEL"] = known["Model"](), known["Model"]()
    given = known["MODEL"], [known["MODEL"].weight, known["OTHER"]]
    assert _result(script_of(train, given, {}, world_size=1, file="it.py")) == (True, True, True)


def test_decorated_functions_are_copied_and_others_that_wrap_are_pickled() -> None:
    train = _function(
        """
        import functools
        from typing import NewType
        def twice(function):
            @functools.wraps(function)
            def doubled(x):
                return 2 * function(x)
            return doubled
        @functools.lru_cache
        def vocab(n):
            return n + STEP
        @twice
        def two(x):
            return x
        def one(x):
            return x
        one = twice(one)
        four = twice(two)
        halves = functools.cache(lambda x: x / 2)
        @functools.singledispatch
        def area(side):
            return 0
        @area.register
        def _(side: int):
            return side * side
        Count = [NewType("Count", int)][0]
        def train(n: Count, *functions):
            return [f(n) for f in (vocab, one, two, four, halves, area, Count, *functions)]
        """,
        STEP=5,
    )
    known = train.__globals__
    text = script_of(train, (3, known["vocab"], known["four"]), {}, world_size=1, file="it.py")
    assert _result(text) == train(3, known["vocab"], known["four"])
    assert "@functools.lru_cache\ndef vocab" in text
    assert "@twice\ndef two" in text


def _run(*command: str, **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
