"""What a notebook really holds travels to the ranks and comes back, in a real kernel."""

import pytest

from tests.kernel.notebooks import open_notebook


@pytest.fixture(scope="module")
def book():
    """One notebook for all tests of this file, as a person uses one for a day."""
    with open_notebook() as notebook:
        notebook.run(_BEGIN)
        yield notebook


_BEGIN = """
import os, threading, time
from dataclasses import dataclass
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from notebook_accel import notebook_launcher, runs

def launch(function, *args, n=2, **options):
    return notebook_launcher(function, args, n, **options)

def summed(value):
    total = torch.tensor([float(value)])
    dist.all_reduce(total)
    return total.item()
"""


def test_what_cells_define_comes_back_as_itself(book):
    book.run("""
        def helper():
            return "old"

        class Net(torch.nn.Linear):
            def says(self):
                return helper()

        @dataclass
        class Point:
            x: int
            y: int = 0

        factor = 3
        scale = lambda value: value * factor

        def make(seen):
            def closure(rank):
                return seen + [rank]
            return closure
    """)
    book.run("""
        def train(closure, point):
            rank = int(os.environ["RANK"])
            assert isinstance(point, Point)
            net = Net(2, 2)
            return closure(rank), scale(rank), Point(point.x, rank), net, net.says(), Net, scale

        run = launch(train, make([7]), Point(5))
        for rank, (closed, scaled, point, net, said, kind, function) in enumerate(run):
            assert closed == [7, rank]
            assert scaled == 3 * rank
            assert type(point) is Point and point == Point(5, rank)
            assert type(net) is Net and kind is Net and isinstance(net, Net)
            assert function is scale
            assert said == "old" == net.says()
        assert Net.says.__globals__ is globals()
    """)
    book.run("""
        def helper():
            return "new"
    """)
    book.run("""
        assert Net(2, 2).says() == "new" == net.says()
        assert launch(train, make([]), Point(1))[1][4] == "new"
    """)


def test_a_loader_that_the_notebook_has_read_starts_its_own_workers(book):
    book.run("""
        looked_at = DataLoader(range(8), batch_size=4, num_workers=1, persistent_workers=True)
        first = next(iter(looked_at))

        def read_again():
            return [batch.tolist() for batch in looked_at]

        assert [*launch(read_again)] == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2
        assert next(iter(looked_at)).tolist() == first.tolist()
    """)


def test_a_kernel_that_has_threads_gradients_and_a_group_of_its_own(book):
    book.run("""
        torch.set_num_threads(2)
        weight = torch.randn(600, 600, requires_grad=True)
        (torch.randn(600, 600) @ weight).relu().sum().backward()
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))

        def train():
            dist.init_process_group("gloo")
            grad, = torch.autograd.grad((torch.ones(300, 600) @ weight).sum(), weight)
            return summed(grad.mean().item())

        assert [launch(train).results for _ in range(2)] == [[600.0, 600.0]] * 2
        assert dist.is_initialized() and dist.get_world_size() == 1
        dist.destroy_process_group()
    """)


def test_the_notebooks_model_is_untouched_and_the_returned_one_is_trained(book):
    book.run("""
        from notebook_accel import Accelerator

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        inputs = torch.randn(64, 4)
        targets = inputs.sum(dim=1, keepdim=True)
        before = {name: value.clone() for name, value in model.state_dict().items()}

        def train():
            accelerator = Accelerator()
            data = torch.utils.data.TensorDataset(inputs, targets)
            loader = DataLoader(data, batch_size=8, shuffle=True)
            net, opt, loader = accelerator.prepare(model, optimizer, loader)
            for _ in range(20):
                for x, y in loader:
                    opt.zero_grad()
                    accelerator.backward(torch.nn.functional.mse_loss(net(x), y))
                    opt.step()
            return net

        first, second = launch(train)
        loss = lambda net: torch.nn.functional.mse_loss(net(inputs), targets).item()
        assert type(first) is torch.nn.Linear
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
        assert not optimizer.state
        assert loss(first) < 0.1 * loss(model), (loss(first), loss(model))
        assert torch.equal(first.weight, second.weight)
    """)


def test_a_managers_proxies_reach_it_from_the_ranks(book):
    book.run("""
        import multiprocessing
        manager = multiprocessing.Manager()
        seen, queue, lock = manager.dict(inner=manager.list()), manager.Queue(), manager.Lock()

        def tell(seen, queue, lock):
            rank = int(os.environ["RANK"])
            with lock:
                seen[rank] = os.getpid()
                seen["inner"].append(rank)
            queue.put(rank)
            return seen

        run = launch(tell, seen, queue, lock)
        assert [seen[0], seen[1]] == run.pids and sorted(seen["inner"]) == [0, 1]
        assert sorted([queue.get(timeout=9), queue.get(timeout=9)]) == [0, 1]
        assert run[1].keys() == seen.keys()
        manager.shutdown()
    """)


@pytest.mark.parametrize(
    "method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.long)]
)
def test_processes_that_a_rank_starts_find_what_cells_define(book, method):
    book.run(f"""
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor
        factor = 3

        @dataclass
        class Sample:
            x: torch.Tensor
            rank: int

        class Samples(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, index): return Sample(torch.tensor(index * factor), index)

        def collate(samples):
            return Sample(torch.stack([sample.x for sample in samples]), len(samples))

        def cubed(sample): return Sample(sample.x ** 3, factor)
        def uses_what_cannot_be_pickled(): return opened

        def train(weights=torch.zeros(3)):
            global opened
            opened = threading.Lock()
            loader = DataLoader(
                Samples(), 2, num_workers=1, collate_fn=collate, multiprocessing_context="{method}"
            )
            batches = list(loader)
            context = multiprocessing.get_context("{method}")
            with context.Pool(1) as pool:
                cubes = pool.map_async(cubed, [Sample(torch.tensor(2), 0)]).get(60)
            with ProcessPoolExecutor(1, context) as pool:
                cubes += pool.map(cubed, cubes)
            return batches, cubes

        batches, cubes = launch(train, n=1)[0]
        assert [type(one) for one in batches + cubes] == [Sample] * 4
        assert [batch.x.tolist() for batch in batches] == [[0, 3], [6, 9]]
        assert [(cube.x.item(), cube.rank) for cube in cubes] == [(8, 3), (512, 3)]
    """)


def test_streams_of_the_notebook_are_those_of_the_rank(book):
    book.run("""
        import sys
        def speak(out=sys.stdout, **more):
            print("heard", file=out)
            return out is sys.stdout and more["err"] is sys.stderr
        run = launch(speak, kwargs={"err": sys.stderr})
        assert run.results == [True, True] and run.logs(0) == "heard\\n"
    """)


def test_a_launch_whose_value_nobody_assigned_has_its_results_in_the_last_run(book):
    book.run("""
        from notebook_accel import last_run
        launch(lambda: int(os.environ["RANK"]));
        older = last_run().id
        assert last_run().results == [0, 1]
        assert last_run()[0] == 0
        launch(lambda: "newer");
        assert last_run().results == ["newer", "newer"]
        assert [run for run in runs() if run.id == older][0].results == [None, None]
    """)


def test_a_session_drops_the_functions_and_classes_that_the_notebook_has_dropped(notebook):
    notebook.run("""
        %load_ext notebook_accel
        import ctypes, gc, os
        import numpy as np, psutil
        from notebook_accel import notebook_launcher

        def make(number):
            class Part:
                data = np.full(10_000_000, number, np.uint8)
            def part(data=np.full(10_000_000, number, np.uint8)):
                ctypes.CDLL(None).malloc_trim(0)  # the C library keeps what is free
                return os.getpid(), int(data[0]), Part, part
            return part

        def megabytes(pid):
            ctypes.CDLL(None).malloc_trim(0)
            return psutil.Process(pid).memory_info().rss / 1e6

        def send(numbers):
            for number in numbers:
                part = make(number)
                pid, first, kind, back = notebook_launcher(
                    part, num_processes=1, session=True, view="none"
                )[0]
                assert first == number and back is part
                assert kind.__qualname__ == "make.<locals>.Part" and kind.data[0] == number
                del kind, back, part
                gc.collect()
            return pid

        pid = send(range(5))
        before = megabytes(os.getpid()), megabytes(pid)
        send(range(30))
        grown = megabytes(os.getpid()) - before[0], megabytes(pid) - before[1]
    """)
    kernel, rank = notebook.value("grown")
    print(f"grown by {kernel:.0f} MB in the kernel, {rank:.0f} MB in the rank")
    # All that was sent is 600 MB.
    assert kernel < 150
    assert rank < 150


def test_what_needs_the_notebooks_shell_is_refused(book):
    book.run("""
        def shell():
            !nvidia-smi
        def timed():
            %time launch
        def leaves():
            exit()
        ways = {shell: "ranks have no shell", timed: "time.perf_counter()", leaves: "sys.exit()"}
        for function, way in ways.items():
            try:
                launch(function)
                said = ""
            except Exception as error:
                said = str(error)
            assert f"used in {function.__name__}, cannot travel" in said and way in said, said
    """)
