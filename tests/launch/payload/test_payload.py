"""What goes to a rank, what comes back, and what neither leaves behind."""

import io
import pickle
import sys
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from notebook_accel.errors import LaunchError, WorkerError
from notebook_accel.launch import payload
from notebook_accel.launch.payload import pack, pickling
from notebook_accel.private import of_libraries
from tests.launch.payload.notebooks import opened

# ---- out by value --------------------------------------------------------------------------


def test_classes_of_every_make_travel(notebook):
    notebook.cell("""
        import abc, enum
        from typing import TypeVar

        T = TypeVar("T")

        class Color(enum.Enum):
            RED = 1
            BLUE = 2
            def shout(self): return self.name + "!"

        class Base(abc.ABC):
            made = 0
            def __init__(self, x):
                super().__init__()
                Base.made += 1
                self.x = x
            @abc.abstractmethod
            def name(self): ...
            @classmethod
            def build(cls): return cls(7)

        class Child(Base):
            __slots__ = ("y",)
            class Inner:
                value = 3
            def __init__(self, x):
                super().__init__(x + 1)
                self.y = x
            def name(self): return f"{type(self).__name__}{self.x}{self.Inner.value}"

        def train():
            child = Child.build()
            facts = Color(2).shout(), child.name(), Base.made
            return facts, Color.RED, T, child, Child.Inner()
    """)
    facts, red, hint, child, inner = notebook.launch("train")
    assert facts == ("BLUE!", "Child83", 1)
    assert (red, hint) == (notebook["Color"].RED, notebook["T"])
    assert [type(child), type(inner)] == [notebook["Child"], notebook["Child"].Inner]
    assert (child.x, child.y) == (8, 7)
    assert notebook["Base"].made == 0


def test_instances_that_forward_attributes_travel(notebook):
    notebook.cell("""
        class Wrapper:
            def __init__(self, inner): self.inner = inner
            def __getattr__(self, name): return getattr(self.inner, name)

        class Settings(dict):
            def __init__(self, **values): super().__init__(values); self.__dict__["own"] = 5
            def __getattr__(self, name): return self[name]
            def __getstate__(self): return vars(self)  # Python 3.10 asks __getattr__ for it

        def train(wrapper, settings): return wrapper.count(2), settings, wrapper
    """)
    arguments = notebook["Wrapper"]([1, 2, 2]), notebook["Settings"](lr=0.1)
    count, settings, wrapper = notebook.launch("train", *arguments)
    assert count == 2
    assert (settings.lr, settings.own, type(settings)) == (0.1, 5, notebook["Settings"])
    assert (wrapper.inner, type(wrapper)) == ([1, 2, 2], notebook["Wrapper"])


def test_what_pickle_knows_by_name_alone_travels(notebook):
    notebook.cell("""
        import functools
        from typing import Callable, NewType, ParamSpec, TypeVar

        P, R, Id = ParamSpec("P"), TypeVar("R"), NewType("Id", int)

        @functools.lru_cache(maxsize=50)
        def fibonacci(n):
            return fibonacci(n - 1) + fibonacci(n - 2) if n > 1 else n

        @functools.singledispatch
        def kind(x): return "any"
        @kind.register
        def _(x: int): return "int"

        class Lazy:
            @functools.cache
            def cached(): return "cached"
            @functools.cached_property
            def value(self): return 3
            @functools.singledispatchmethod
            def of(self, x): return "any"
            @of.register
            def _(self, x: int): return "int"

        def same(f: Callable[P, R]) -> Callable[P, R]:
            def inner(*args: P.args, **kwargs: P.kwargs) -> R: return f(*args, **kwargs)
            return inner

        lazy = Lazy()

        @same
        def train(i: Id = Id(4)):
            return (fibonacci(30), fibonacci.cache_info().maxsize, kind(1), kind(""), lazy.value,
                    Lazy().of(1), Lazy.cached(), fibonacci, Lazy(), Id, P)
    """)
    found = notebook.launch("train")
    assert found[:7] == (832040, 50, "int", "any", 3, "int", "cached")
    assert found[7] is notebook["fibonacci"]
    assert type(found[8]) is notebook["Lazy"]
    assert found[8].value == 3
    assert found[9:] == (notebook["Id"], notebook["P"])
    assert notebook["fibonacci"].cache_info().currsize == 0


def test_compiled_and_parametrized_models_travel(notebook):
    notebook.cell("""
        import torch
        from torch.nn.utils.parametrizations import weight_norm

        compiled = torch.compile(torch.nn.Linear(2, 1), backend="eager")
        normed = weight_norm(torch.nn.Linear(2, 1))

        @torch.compile(backend="eager", dynamic=True)
        def double(x): return 2 * x

        def train():
            torch.backends.cudnn.benchmark = True  # of a module whose class is torch's own
            x = torch.ones(1, 2)
            with torch.no_grad():
                normed.parametrizations.weight.original0.fill_(0)
            return double(x)[0, 0].item(), compiled(x).shape, normed, compiled
    """)
    doubled, shape, normed, compiled = notebook.launch("train")
    assert (doubled, shape) == (2, (1, 1))
    assert type(normed) is type(notebook["normed"])
    assert not normed.weight.any()
    assert notebook["normed"].weight.any()
    assert torch.equal(compiled.weight, notebook["compiled"].weight)


def test_a_scheduler_travels_with_its_optimizer(notebook):
    """As in Diffusers' tutorial, whose function gets both as arguments; torch has no warning."""
    notebook.cell("""
        import warnings
        import torch

        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

        def train(optimizer, schedule, num_steps):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(num_steps):
                    optimizer.step()
                schedule.step()
            told = [str(one.message).partition(" of ")[0] for one in caught]
            return schedule.optimizer is optimizer, schedule.get_last_lr(), told
    """)
    both = notebook["optimizer"], notebook["schedule"]
    assert notebook.launch("train", *both, 1) == (True, [0.5], [])
    assert notebook.launch("train", *both, 0) == (True, [0.5], ["Detected call"])


def test_only_what_is_used_travels_and_main_is_one_namespace(notebook):
    notebook.cell("""
        import sys
        from dataclasses import dataclass
        import torch

        counter = 0
        unused = open("/dev/null", "w")
        dtype = torch.float32

        def count():
            global counter
            counter += 1
            return counter

        def train():
            global late
            count()
            late = "late"
            @dataclass
            class Local:
                values: torch.Tensor
                kind: str = str(dtype)
            here = sys.modules["__main__"]
            return (
                counter, here.counter, count(), here.late, Local(None).kind, __name__,
                train is here.train, train.__globals__ is vars(here), "unused" in vars(here),
            )
    """)
    expected = (1, 1, 2, "late", "torch.float32", "__main__", True, True, False)
    assert notebook.launch("train") == expected
    assert notebook["counter"] == 0


def test_what_a_library_has_at_a_name_travels_by_it_where_it_cannot_be_pickled(
    notebook, tmp_path, monkeypatch
):
    """As a logger whose sinks hold open files and locks."""
    packages = tmp_path / "site-packages"
    (packages / "noisy").mkdir(parents=True)
    (packages / "noisy" / "__init__.py").write_text("from noisy._logger import logger\n")
    (packages / "noisy" / "_logger.py").write_text(
        "import sys, threading\n"
        "class Logger:\n"
        "    def __init__(self): self.sinks = [open('/dev/null', 'a')]; self.lines = []\n"
        "logger, LOCK, PLAIN = Logger(), threading.Lock(), Logger()\n"
        "PLAIN.sinks.clear()\n"
    )
    monkeypatch.syspath_prepend(str(packages))
    notebook.cell("""
        import threading
        from noisy import logger
        from noisy._logger import LOCK, PLAIN
        PLAIN.lines.append("set in a cell")
        mine = threading.Lock()

        def train(given):
            import noisy
            assert given["log"] is logger is noisy.logger and LOCK is noisy._logger.LOCK
            assert PLAIN is not noisy._logger.PLAIN
            return PLAIN.lines, logger.lines

        def other(): return logger, mine
    """)
    notebook["logger"].lines.append("gone")
    assert notebook.launch("train", {"log": notebook["logger"]}) == (["set in a cell"], [])
    (notice,) = notebook.pack("train", {"log": notebook["logger"]}).notices
    assert notice.startswith("`noisy.logger`, `noisy._logger.LOCK` cannot be pickled, and ranks im")
    with pytest.raises(
        LaunchError, match=r"^`mine` \(_thread\.lock\), used in other, cannot travel"
    ):
        notebook.pack("other")
    for name in list(sys.modules):
        if name.startswith("noisy"):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.filterwarnings("ignore:.*torch.jit:Warning")
def test_torchscript_travels_both_ways(notebook):
    notebook.cell("""
        import torch
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        net[0].weight.requires_grad_(False)
        scripted = torch.jit.script(net).eval()
        traced = torch.jit.trace(net, torch.zeros(1, 2))
        class Around(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = scripted
        around = Around()

        @torch.jit.script
        def double(x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        def train(x):
            assert [p.requires_grad for p in scripted.parameters()] == [False, True]
            assert not scripted.training
            return scripted(x), traced(x), around.inner(x), double(x), scripted
    """)
    x = torch.randn(3, 2)
    *outputs, twice, back = notebook.launch("train", x)
    for output in (*outputs, back(x)):
        assert torch.equal(output, notebook["net"](x))
    assert torch.equal(twice, 2 * x)


# ---- back by reference ---------------------------------------------------------------------


def test_what_a_rank_made_itself_comes_by_value(notebook):
    notebook.cell("""
        base = 1
        def train():
            global base
            base = 2
            class Made:
                def get(self): return base
            def function(): return base + 1
            return Made(), function
    """)
    made, function = notebook.launch("train")
    assert (made.get(), function()) == (2, 3)
    assert notebook["base"] == 1


# ---- tensors -------------------------------------------------------------------------------


def test_ties_views_and_identity_are_kept(notebook):
    notebook.cell("""
        import numpy as np
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(5, 4)
                self.head = nn.Linear(4, 5, bias=False)
                self.head.weight = self.embed.weight
                self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            def forward(self, x): return self.head(self.embed(x))

        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        whole = torch.arange(12.0).reshape(3, 4)
        row, turned = whole[1], whole.T
        half = torch.ones(3, dtype=torch.bfloat16)
        wanted = torch.ones(2, requires_grad=True)
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        empty = torch.empty(0, 3)
        table = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
        strided = np.arange(10)[::2]
        objects = np.array([{}, None], dtype=object)
        memory = np.zeros(4)
        twins = torch.from_numpy(memory), torch.from_numpy(memory)

        def train():
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(torch.tensor([0, 1])).square().mean()
                loss.backward()
                optimizer.step()
            model.steps += 2
            whole[1, 2] = 100
            twins[0][0] = 7
            assert model.head.weight is model.embed.weight
            assert optimizer.param_groups[0]["params"][0] is model.embed.weight
            assert row[2] == turned[2, 1] == 100 and half.dtype is torch.bfloat16
            assert wanted.requires_grad and wanted.is_leaf
            assert type(frozen) is nn.Parameter and not frozen.requires_grad
            assert empty.shape == (0, 3) and table["b"][0] == 2 and strided.sum() == 20
            assert len(objects) == 2 and twins[1][0] == 7
            wanted.share_memory_()
            table["a"] = 5
            return model, optimizer, loss, whole, row, half, table, empty
    """)
    weight = notebook["model"].embed.weight.clone()
    model, optimizer, loss, whole, row, half, table, empty = notebook.launch("train")
    # what came back is trained, of the notebook's class, and as closely tied
    assert type(model) is notebook["Net"]
    assert model.head.weight is model.embed.weight is optimizer.param_groups[0]["params"][0]
    assert optimizer.state[model.embed.weight]["step"] == 2
    assert model.steps == 2
    assert not torch.equal(model.embed.weight, weight)
    assert (loss.requires_grad, loss.shape) == (False, ())
    row[0] = -1
    assert (whole[1, 0], whole[1, 2]) == (-1, 100)
    assert half.tolist() == [1, 1, 1]
    assert (table["a"][0], empty.shape) == (5, (0, 3))
    # what is in the notebook is as it was
    assert torch.equal(notebook["model"].embed.weight, weight)
    assert not weight.is_shared()
    assert not notebook["model"].embed.weight.is_shared()
    assert notebook["whole"][1, 2] == 6
    assert notebook["table"]["a"][0] == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_less_usual_tensors_travel(notebook):
    notebook.cell("""
        import torch
        dense = torch.eye(3)
        class Named(torch.Tensor):
            pass
        tensors = dict(
            sparse=dense.to_sparse(), csr=dense.to_sparse_csr(),
            quantized=torch.quantize_per_tensor(dense, 0.1, 0, torch.quint8),
            meta=torch.empty(2, 3, device="meta"), complex=torch.ones(2, dtype=torch.complex64),
            conj=torch.ones(2, dtype=torch.complex64).conj() * 1j,
            bool=torch.ones(2, dtype=torch.bool),
            subclass=torch.ones(2).as_subclass(Named), expanded=torch.ones(1).expand(4),
            tokens=torch.ones(2, dtype=torch.uint16), float8=torch.ones(2).to(torch.float8_e4m3fn),
        )
        def train(generator):
            return tensors, torch.rand(2, generator=generator), dense.untyped_storage()
    """)
    sent = notebook["tensors"]
    generator = torch.Generator().manual_seed(3)
    tensors, drawn, storage = notebook.launch("train", generator)
    assert torch.equal(tensors["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(tensors["csr"].to_dense(), torch.eye(3))
    assert torch.equal(tensors["quantized"].int_repr(), sent["quantized"].int_repr())
    assert (tensors["meta"].device.type, tensors["meta"].shape) == ("meta", (2, 3))
    assert type(tensors["subclass"]) is notebook["Named"]
    assert tensors["expanded"].stride() == (0,)
    assert tensors["float8"].dtype == torch.float8_e4m3fn
    for name in ("complex", "conj", "bool", "tokens"):
        assert torch.equal(tensors[name], sent[name])
    assert torch.equal(drawn, torch.rand(2, generator=generator))
    assert storage.tolist() == notebook["dense"].untyped_storage().tolist()


def test_a_big_tensor_is_never_copied_into_the_pickle(notebook, monkeypatch):
    notebook.cell("""
        import torch
        big = torch.zeros(75_000_000)
        text = "x" * 300_000
        def train():
            big[::1000] += 1
            return int(big.sum()), big[:5].clone(), text
    """)
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(payload, "pack", lambda packed: (seen.append(packed), pack(packed))[1])
        notebook.pack("train")
    [packed] = seen
    assert packed.buffers[0].nbytes < 10_000
    assert max(view.nbytes for view in packed.buffers) == 300_000_000
    address = np.frombuffer(packed.buffers[1], dtype=np.uint8).ctypes.data
    assert address == notebook["big"].data_ptr()
    total, start, text = notebook.launch("train")
    assert (total, start.tolist(), len(text)) == (75_000, [1, 0, 0, 0, 0], 300_000)
    assert not notebook["big"].any()


def test_an_array_mapped_from_a_file_is_mapped_by_the_rank(notebook, monkeypatch, tmp_path):
    # nanoGPT's notebooks map their tokens in a cell; the file is often larger than the memory.
    monkeypatch.chdir(tmp_path)
    notebook.cell("""
        import numpy as np
        from pathlib import Path
        folder = Path()
        np.arange(6_000_000, dtype=np.uint16).tofile(folder / "train.bin")
        tokens = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
        val = tokens[5_000_000:]
        np.save(folder / "rows.npy", np.arange(6_000_000.0).reshape(2_000_000, 3))
        rows = np.load(folder / "rows.npy", mmap_mode="r")
        turned = np.memmap(folder / "turned", np.float32, "w+", shape=(3, 2), order="F")
        turned[2, 1] = 5
        def train():
            turned[0, 0] = 7
            return [int(tokens[65_535]), int(val[1]), len(val), rows[1_999_999].tolist(),
                    turned[2].tolist(), type(val).__name__, tokens.flags.writeable]
    """)
    assert sum(view.nbytes for view in opened(notebook.pack("train")).buffers) < 20_000
    expected = [65_535, 5_000_001 % 65_536, 1_000_000, [5_999_997, 5_999_998, 5_999_999]]
    assert notebook.launch("train") == [*expected, [0, 5], "memmap", False]
    assert notebook["turned"][0, 0] == 7

    # These cannot be mapped again: private changes, a step, a file that is gone, and one in whose
    # place is another.
    notebook.cell("""
        private = np.memmap(folder / "train.bin", dtype=np.uint16, mode="c")
        private[0] = 9
        steps = tokens[:10:2]
        gone = np.memmap(folder / "gone", np.uint8, "w+", shape=4)
        (folder / "gone").unlink()
        np.arange(4.0).tofile(folder / "data")
        earlier = np.memmap(folder / "data", mode="r", dtype=float)
        np.ones(4).tofile(folder / "new")
        (folder / "new").replace(folder / "data")
        def train():
            return int(private[0]), steps.tolist(), gone.tolist(), earlier.tolist()
    """)
    assert notebook.launch("train") == (9, [0, 2, 4, 6, 8], [0, 0, 0, 0], [0, 1, 2, 3])


def test_a_file_of_hdf5_that_is_read_is_opened_by_the_rank(notebook, monkeypatch, tmp_path):
    # A dataset opens it lazily, and a cell has looked at a sample.
    monkeypatch.chdir(tmp_path)
    notebook.cell("""
        import h5py, torch
        with h5py.File("data.h5", "w") as file:
            file["train/x"] = [[1.0, 2.0], [3.0, 4.0]]
            file.attrs["classes"] = 2
        class Rows(torch.utils.data.Dataset):
            file = None
            def __len__(self): return 2
            def __getitem__(self, index):
                self.file = self.file or h5py.File("data.h5")
                return torch.from_numpy(self.file["train/x"][index])
        rows = Rows()
        assert rows[0].tolist() == [1, 2]
        x, group, closed = rows.file["train/x"], rows.file["train"], file
        def train():
            return rows[1].tolist(), x[0].tolist(), [*group], rows.file.attrs["classes"].item()
        def write():
            return closed
    """)
    assert notebook.launch("train") == ([3, 4], [1, 2], ["x"], 2)
    with pytest.raises(LaunchError, match=r"`closed` .*h5py.* cannot travel"):
        notebook.launch("write")


def test_another_machine_that_lacks_the_file_of_a_mapped_array_says_so(tmp_path):
    file, pickled = tmp_path / "train.bin", io.BytesIO()
    np.arange(4.0).tofile(file)
    pickling.CallPickler(pickled).dump(np.memmap(file, mode="r", dtype=float))
    file.unlink()
    with pytest.raises(
        RuntimeError, match=f"{file}, .* cannot be opened here .*each machine needs"
    ):
        pickle.loads(pickled.getvalue())


def test_what_is_not_on_the_cpu_is_told_of(notebook):
    notebook.cell("""
        import torch
        class Elsewhere(torch.UntypedStorage):
            device = torch.device("cuda", 1)
            def cpu(self): return torch.UntypedStorage(self.tolist())
        class Thing:
            device = Elsewhere.device
            def __init__(self): self.memory = Elsewhere([1, 2, 3])
            def untyped_storage(self): return self.memory
        thing, others = Thing(), {"a": Thing()}
        def train(): return thing.memory.tolist(), others["a"].memory.device.type
    """)
    (notice,) = notebook.pack("train").notices
    assert notice == (
        "2 tensors (0.0 MB) on cuda:1 arrive in the ranks on the CPU: "
        "prepare the model there, or move them with `.to(accelerator.device)`."
    )
    assert notebook.launch("train") == ([1, 2, 3], "cpu")


def test_the_notebooks_models_are_named(notebook):
    notebook.cell("""
        import torch
        model, other, unused = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        def use(): return model
        def train(net): return use(), model, net
    """)
    assert notebook.pack("train", notebook["other"]).models == ("net", "model")
    assert notebook.pack("use").notices == ()


# ---- what lives in a rank's process --------------------------------------------------------


@pytest.mark.parametrize(
    ("on_cpu", "count", "device", "num_gpus"),
    [(False, 2, "cuda:1", 1), (False, 1, "cuda:0", 1), (False, 0, "cpu", 0), (True, 2, "cpu", 0)],
)
def test_training_arguments_have_the_device_of_the_rank(
    monkeypatch, on_cpu, count, device, num_gpus
):
    kind = torch.device("cuda") if count else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: kind)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(on_cpu).lower())
    arguments, later = SimpleNamespace(), SimpleNamespace()
    asked = {"seed": 3, "ddp_backend": "gloo", "ddp_timeout": 77, "distributed_state": later}
    # What the notebook found, which has other devices maybe.
    found = {"_setup_devices": torch.device("cuda:0" if num_gpus else "cpu"), "_n_gpu": 2}
    of_libraries.restore_arguments(arguments, {**asked, **found})
    expected = {**asked, "_setup_devices": torch.device(device), "_n_gpu": num_gpus}
    assert vars(arguments) == expected
    timeout = timedelta(seconds=77)
    other = {"cpu": True} if on_cpu else {"timeout": timeout}
    assert later.settings == {"backend": "gloo", **other}


def test_the_cells_sources_are_there(notebook):
    notebook.cell("unused = 1")
    notebook.cell("""
        import inspect
        import torch

        def train():
            compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
            return inspect.getsource(train), compiled(torch.ones(1)).item()
    """)
    source, value = notebook.launch("train")
    assert source.startswith("def train():\n    compiled =")
    assert value == 3
    packed = opened(notebook.pack("train"))
    assert b"unused = 1" not in bytes(packed.buffers[0])


# ---- modules -------------------------------------------------------------------------------


def test_modules_beside_the_notebook(notebook, tmp_path, monkeypatch):
    module = tmp_path / "beside_the_notebook.py"
    module.write_text("def value(): return 'first'\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    notebook.cell("""
        import beside_the_notebook as lib
        from beside_the_notebook import Thing, value
        def train(): return value(), lib.value(), Thing()
    """)
    first = notebook.launch("train")
    assert first[:2] == ("first", "first")
    assert type(first[2]) is notebook["Thing"]
    module.write_text("def value(): return 'second, longer'\nclass Thing: pass\n")
    assert notebook.launch("train")[:2] == ("second, longer", "second, longer")
    # as autoreload leaves it: the names that the cells imported are no longer the module's own
    sys.modules["beside_the_notebook"].__dict__["value"] = lambda: "third"
    assert notebook.launch("train")[0] == "first"
    del sys.modules["beside_the_notebook"]


# ---- exceptions ----------------------------------------------------------------------------


def test_exceptions_come_back_as_the_notebooks_own(notebook):
    notebook.cell("""
        import threading
        class Plain(Exception): pass
        class Odd(Exception):
            def __init__(self, code, *, where):
                super().__init__(f"{code} at {where}")
                self.code = code
        class Held(Exception): pass
        def train(kind):
            if kind == "plain": raise Plain("a", 1)
            if kind == "odd": raise Odd(5, where="home")
            if kind == "system": open("/not/there")
            if kind == "unicode": b"\\xff".decode()
            if kind == "local":
                class Local(KeyError): pass
                raise Local("k")
            error = Held("x")
            error.lock = threading.Lock()
            raise error
    """)

    def raised(kind):
        with pytest.raises(WorkerError) as caught:
            notebook.launch("train", kind)
        return caught.value.__cause__

    plain, odd = raised("plain"), raised("odd")
    assert type(plain) is notebook["Plain"]
    assert plain.args == ("a", 1)
    assert type(odd) is notebook["Odd"]
    assert (str(odd), odd.code) == ("5 at home", 5)
    system = raised("system")
    assert type(system) is FileNotFoundError
    assert system.filename == "/not/there"
    assert raised("unicode").reason == "invalid start byte"
    assert isinstance(raised("local"), KeyError)
    assert raised("held") is None


def test_an_exception_that_does_not_unpickle_is_none():
    assert payload.unpack_exception(None, payload.Registry()) is None
    assert payload.unpack_exception(b"garbage", payload.Registry()) is None
    data = payload.pack_exception(ValueError("x"))
    error = payload.unpack_exception(data, payload.Registry())
    assert isinstance(error, ValueError)


def test_a_result_that_is_a_small_part_of_a_tensor_comes_without_the_rest():
    big = torch.arange(10_000_000)
    for part in (big[:3], big[-3:].to(torch.bfloat16), big[100:200:7], big[7], big[3:3]):
        packed = payload.pack_result({"part": part})
        assert sum(buffer.nbytes for buffer in packed.buffers) < 10_000
        copies = tuple(memoryview(bytearray(buffer)) for buffer in packed.buffers)
        back = payload.unpack_result(payload.Packed(copies), payload.Registry())
        assert torch.equal(back["part"], part)
