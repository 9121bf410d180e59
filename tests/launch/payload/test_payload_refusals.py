"""What cannot travel is named, with where it is used and what to do, before any process starts."""

import re
import sys
import threading
import types

import pytest
from torch.utils.data import DataLoader

from notebook_accel import Accelerator
from notebook_accel.errors import LaunchError
from notebook_accel.launch import payload
from notebook_accel.launch.payload.pickling import STAYS_HOME


def refusal(notebook, function, *args, **kwargs):
    with pytest.raises(LaunchError) as caught:
        notebook.pack(function, *args, **kwargs)
    return str(caught.value)


def test_what_cannot_be_pickled_is_named(notebook):
    notebook.cell("""
        import sqlite3, threading
        import torch
        conn = sqlite3.connect(":memory:")
        fine = {"numbers": [1, 2]}
        config = {"lr": 1, "db": [0, conn]}

        def train(x=None): return fine, conn
        def load(): return conn
        def nested():
            def inner(): return load()
            return fine, inner()
        def contained(): return config["db"]

        class Reader:
            shared = threading.Lock()
            def __init__(self, path): self.path = path
        reader = Reader("a")
        def reads(): return reader

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first = torch.nn.Linear(1, 1)
                self.first.helper = (i for i in range(3))
        model = Net()
        def models(): return model

        def ping(n): return pong(n)
        def pong(n): return ping(n) if n else conn

        def closing():
            log = open("/dev/null", "w")
            def inner(): return log
            return inner
        closed = closing()
        def default(lock=threading.Lock()): return lock
        method = reader.__init__
    """)
    conn = "`conn` (sqlite3.Connection)"
    reason = "create it inside the function (cannot pickle 'sqlite3.Connection' object)"
    assert refusal(notebook, "train") == f"{conn}, used in train, cannot travel; {reason}"
    assert refusal(notebook, "nested") == f"{conn}, used in load, cannot travel; {reason}"
    assert refusal(notebook, "ping", 1) == f"{conn}, used in pong, cannot travel; {reason}"
    expected = {
        "contained": "`config['db'][1]` (sqlite3.Connection), used in contained, cannot travel;",
        "reads": "`Reader.shared` (_thread.lock), used in Reader, cannot travel; create",
        "models": "`model.first.helper` (generator), used in models, cannot travel; create",
        "closed": "`log` (_io.TextIOWrapper), used in inner, cannot travel; create it inside",
        "default": "`lock` (_thread.lock), used in default, cannot travel; create it inside",
    }
    for function, start in expected.items():
        assert refusal(notebook, function).startswith(start)


def test_arguments_are_named_as_the_function_names_them(notebook):
    notebook.cell("def train(data, *rest, option=None, **more): pass")
    lock = threading.Lock()
    for args, kwargs, name in (
        ((lock,), {}, "data"),
        ((1, 2, [lock]), {}, "rest[1][0]"),
        ((1,), {"option": {"a": lock}}, "option['a']"),
        ((1,), {"other": lock}, "more['other']"),
    ):
        start = f"`{name}` (_thread.lock), used in train, cannot travel; create it inside"
        assert refusal(notebook, "train", *args, **kwargs).startswith(start)


def test_what_would_be_wrong_is_refused_by_its_class(notebook):
    notebook.cell(f"""
        class Accelerator:
            {STAYS_HOME} = "make it inside the function"
        class Derived(Accelerator): pass
        accelerator = Derived()
        class Trainer:
            def __init__(self): self.accelerator = accelerator
        trainer = Trainer()
        def train(): return accelerator
        def method(): return trainer
        def makes(): return Accelerator()
        import ctypes
        libc = ctypes.CDLL(None)
        def trim(): libc.malloc_trim(0)
    """)
    assert refusal(notebook, "train") == (
        "`accelerator` (Derived), used in train, cannot travel; make it inside the function"
    )
    assert refusal(notebook, "method").startswith("`trainer.accelerator` (Derived), used in method")
    assert refusal(notebook, "trim") == (
        "`libc` (ctypes.CDLL), used in trim, cannot travel; make it inside the function"
    )
    assert notebook.pack("makes")


def _bare(path):
    """An instance of a class that would do much if it were made properly."""
    module, _, name = path.rpartition(".")
    __import__(module)
    kind = getattr(sys.modules[module], name)
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("IPython.core.interactiveshell.InteractiveShell", "subprocess.run"),
        ("IPython.core.autocall.ExitAutocall", "sys.exit"),
        ("notebook_accel.Accelerator", "make it inside the function"),
        ("notebook_accel.AcceleratedOptimizer", "make it inside the function"),
        ("notebook_accel.AcceleratedScheduler", "make it inside the function"),
        ("accelerate.Accelerator", "make it inside the function"),
        ("accelerate.optimizer.AcceleratedOptimizer", "make it inside the function"),
        ("lightning_fabric.Fabric", "make it inside the function"),
        ("torch.distributed.device_mesh.DeviceMesh", "process group"),
        ("torch.nn.parallel.DistributedDataParallel", "`.module`"),
        ("torch.distributed.HashStore", "process group"),
        ("ipywidgets.IntProgress", "notebook's page"),
        ("tqdm.auto.tqdm", "make the bar inside the function, where it is shown live"),
        ("notebook_accel.Run", r"take what you need of it \(`run\[0\]`\)"),
    ],
)
def test_objects_of_this_process_stay(notebook, path, remedy):
    notebook.cell("def train(): return thing")
    vars(notebook.main)["thing"] = _bare(path)
    text = refusal(notebook, "train")
    assert re.fullmatch(rf"`thing` \(\S+\), used in train, cannot travel; .*{remedy}.*", text)


def test_a_result_that_cannot_be_pickled_is_named(notebook):
    notebook.cell(f"""
        class Prepared:
            {STAYS_HOME} = "return its state"
        def helper(): return lock
    """)
    vars(notebook.main)["lock"] = threading.Lock()
    with pytest.raises(TypeError, match=r"^`lock` \(_thread.lock\), returned, cannot travel to"):
        payload.pack_result(notebook["helper"])
    with pytest.raises(TypeError, match=r"^`result\[0\]` \(Prepared\), .*; return its state$"):
        payload.pack_result([notebook["Prepared"]()])
    loader = Accelerator(cpu=True).prepare(DataLoader(range(2)))
    with pytest.raises(TypeError, match=r"Shard\), .* return values, tensors or models instead$"):
        payload.pack_result(types.SimpleNamespace(loader=loader))
    notebook.cell("""
        class Open:
            def __getstate__(self): raise ValueError("a handle is open inside x.h5")
    """)
    with pytest.raises(TypeError, match=r"\(a handle is open inside x\.h5\)$"):
        payload.pack_result(notebook["Open"]())


def test_an_error_of_the_users_own_keeps_its_traceback(notebook):
    notebook.cell("""
        class Shy:
            def __getstate__(self): raise OSError("stay away\\nplease")
        shy = Shy()
        def train(): return shy
        def locked(): return lock
    """)
    vars(notebook.main)["lock"] = threading.Lock()
    with pytest.raises(LaunchError, match=r"`shy` .*inside the function \(stay away\)$") as caught:
        notebook.pack("train")
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(LaunchError) as caught:
        notebook.pack("locked")
    assert caught.value.__cause__ is None


def test_what_several_processes_would_share_is_refused_or_told(notebook, tmp_path):
    vars(notebook.main)["path"] = str(tmp_path / "text")
    notebook.cell("""
        import multiprocessing as mp, torch
        files = {mode: open(path, mode) for mode in ("w+", "a+", "r+", "r")}
        made = (mp.Lock(), mp.Event(), mp.Barrier(2), mp.Condition(), mp.Queue(), mp.SimpleQueue(),
                mp.Value("i"), mp.Array("i", 2), mp.Pipe()[0])
        shared = torch.zeros(3).share_memory_()
        def writes(file): return file
        def counts(): return shared
    """)
    for mode, file in notebook["files"].items():
        if mode == "r":
            assert notebook.pack("writes", file)
        else:
            assert refusal(notebook, "writes", file) == (
                "`file` (_io.TextIOWrapper), used in writes, cannot travel; create it "
                "inside the function (it is open for writing)"
            )
        file.close()
    for value in notebook["made"]:
        assert "multiprocessing.Manager()" in refusal(notebook, "writes", value), value
    assert notebook.pack("counts").notices == (
        "1 tensor in shared memory: each rank has a copy, and what it writes only it sees.",
    )
