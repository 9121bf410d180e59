"""A real kernel on this host, and ranks on another one: what `notebook_launcher(num_nodes=2)` does.

Run by: make test-hosts (as root, with iproute2 and util-linux).
"""

import os
import re
import shutil
import time

import pytest

from tests.hosts.host import ADDRESS_A, host_b
from tests.kernel.notebooks import SLOW, open_notebook
from tests.waiting import eventually

if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
    pytest.skip("root, iproute2 and util-linux are needed", allow_module_level=True)

pytestmark = pytest.mark.timeout(300)

LAUNCH = "run = notebook_launcher(train, {arguments}num_nodes=2, num_processes=1, devices='cpu', "
LAUNCH += f"master_addr='{ADDRESS_A}', {{options}})"


@pytest.fixture
def other(tmp_path):
    with host_b(tmp_path) as host:
        yield host


@pytest.fixture
def notebook():
    with open_notebook() as notebook:
        notebook.run("from notebook_accel import *\nimport os, time, socket, torch")
        yield notebook


def start(notebook, options="", arguments=""):
    """Launch in a cell; gives the cell, and address and token once the page shows them."""
    cell = notebook.start(LAUNCH.format(arguments=arguments, options=options))
    shown = []

    def is_shown():
        texts = [str(d["data"].get("text/plain")) for d in notebook.kernel.displays.values()]
        for text in texts:
            shown.extend(re.finditer(r"JOIN_TOKEN=(\S{64}) notebook-accel join (\S+)", text))
        return bool(shown)

    assert notebook.kernel.listen_until(is_shown, seconds=SLOW), notebook.kernel.displays
    return cell, shown[-1][2], shown[-1][1]


def launch_on_both(notebook, other, options="", arguments=""):
    cell, address, token = start(notebook, options, arguments)
    return cell, other.join(address, token)


def finish(notebook, cell):
    reply = notebook.finish(cell, timeout=SLOW)
    return "\n".join(reply.traceback)


def arrive(notebook, path):
    eventually(path.exists, within=SLOW, what="the ranks train")
    return time.monotonic()


def test_results_logs_and_surroundings_of_both_hosts(notebook, other):
    notebook.run(
        """
        os.environ["SET_IN_A_CELL"] = "1"
        class Point:
            def __init__(self, x): self.x = x
        def train():
            accelerator = Accelerator()
            print("from", socket.gethostname())
            for step in accelerator.progress(range(3)):
                accelerator.log({"loss": 1 / (step + 1)}, step=step)
            names = "HOME", "TMPDIR", "OF_HOST_B", "SET_IN_A_CELL", "GLOO_SOCKET_IFNAME"
            total = accelerator.reduce(torch.ones(1) * (accelerator.process_index + 1))
            return Point(float(total)), socket.gethostname(), {n: os.environ.get(n) for n in names}
        """
    )
    cell, joined = launch_on_both(notebook, other)
    assert finish(notebook, cell) == ""
    assert joined.wait(30) == 0
    assert notebook.run("print([(type(r[0]) is Point, r[0].x) for r in run])") == (
        "[(True, 3.0), (True, 3.0)]\n"
    )
    hosts = eval(notebook.run("print([r[1] for r in run])"))
    assert hosts[0] != hosts[1] == "host-b"
    mine, theirs = eval(notebook.run("print([r[2] for r in run])"))
    assert (mine["OF_HOST_B"], theirs["OF_HOST_B"]) == (None, "yes")
    assert theirs["HOME"].endswith("home-b")
    assert theirs["TMPDIR"].endswith("home-b/tmp")
    assert (mine["SET_IN_A_CELL"], theirs["SET_IN_A_CELL"]) == ("1", "1")
    assert mine["GLOO_SOCKET_IFNAME"] != theirs["GLOO_SOCKET_IFNAME"]
    assert "from host-b" in notebook.run("print(run.logs(1))")
    assert notebook.run("print(len(run.metrics))") == "3\n"
    assert "3 3" in notebook.run("print(*[f'{p.n:g} {p.total:g}' for p in run.progress])")


LOOP = """
    from pathlib import Path
    def train(path):
        accelerator = Accelerator()
        print("begins on", socket.gethostname())
        loader = accelerator.prepare(torch.utils.data.DataLoader(range(10**7)))
        for step, batch in enumerate(loader):
            accelerator.reduce(torch.ones(1))
            if step == 5 and accelerator.is_main_process:
                Path(path).touch()
"""


@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_host_that_is_gone_is_an_error_within_ten_seconds(how, notebook, other, tmp_path):
    notebook.run(LOOP)
    path = tmp_path / "begun"
    cell, _ = launch_on_both(notebook, other, "", f"({str(path)!r},), ")
    began = arrive(notebook, path)
    getattr(other, how)()
    error = finish(notebook, cell)
    assert "WorkerError" in error
    assert "on host-b (10.77.0.2) was lost" in error
    assert time.monotonic() - began < 10
    if how == "cut":
        eventually(lambda: not other.processes, within=20, what="host B notices as well")


def test_a_kernel_that_dies_leaves_nobody_on_the_other_host(notebook, other, tmp_path):
    notebook.run(LOOP)
    path = tmp_path / "begun"
    launch_on_both(notebook, other, "", f"({str(path)!r},), ")
    arrive(notebook, path)
    os.kill(notebook.pid, 9)
    eventually(lambda: not other.processes, within=20, what="nobody is left on host B")


def test_a_lost_host_is_done_without_from_the_checkpoint_on(notebook, other, tmp_path):
    notebook.run(
        """
        from pathlib import Path
        def train(folder):
            accelerator = Accelerator()
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = torch.utils.data.TensorDataset(torch.arange(400.0).reshape(100, 4) / 400)
            loader = torch.utils.data.DataLoader(data, batch_size=2)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            start = accelerator.resume_or_start(folder)
            print("begins at step", start.step, "of", accelerator.num_processes)
            for step, (batch,) in enumerate(loader, start.batch):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if step == 4:
                    accelerator.save_state()
                if step == 6 and accelerator.num_processes == 2:
                    Path(folder, "begun").touch()
                    time.sleep(600)
            return start.step, accelerator.num_processes
        """
    )
    folder = tmp_path / "checkpoints-of-both"
    folder.mkdir()
    cell, _ = launch_on_both(notebook, other, "max_restarts=1", f"({str(folder)!r},), ")
    arrive(notebook, folder / "begun")
    other.kill()
    assert finish(notebook, cell) == ""
    assert notebook.run("print(run.results)") == "[(5, 1)]\n"
    assert "started again, 1 of 1 times" in notebook.run("print(run.state.notices)")


def test_a_checkpoint_folder_that_one_host_does_not_see_is_one_clear_error(notebook, other):
    notebook.run(
        """
        def train(folder):
            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            accelerator.resume_or_start(folder)
            accelerator.save_state()
        """
    )
    for number in range(2):  # with nothing to resume, and with what only this host sees
        cell, _ = launch_on_both(notebook, other, "", f"({str(other.private)!r},), ")
        error = finish(notebook, cell)
        assert str(other.private) in error
        assert "not seen on the machine of rank " in error
        words = "which rank 0 would resume from" if number else "a disk that all machines share"
        assert words in error
        if not number:
            notebook.run(f"notebook_launcher(train, ({str(other.private)!r},), 1, view='none')")


TRAININGS = {
    "FSDP2": "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, "
    "auto_wrap_policy='size_based_wrap', min_num_params=10)",
    "pipeline": "parallelism_config=ParallelismConfig(pp_size=2, num_microbatches=2)",
}


@pytest.mark.parametrize("kind", TRAININGS)
def test_losses_over_both_hosts_are_those_of_one_process(kind, notebook, other):
    notebook.run(
        f"def asked(): return dict({TRAININGS[kind]}) if os.environ['WORLD_SIZE'] != '1' else {{}}"
    )
    notebook.run(
        """
        def train():
            accelerator = Accelerator(**asked())
            torch.manual_seed(0)
            model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            model, optimizer = accelerator.prepare(model, optimizer)
            losses = []
            for step in range(5):
                inputs = torch.linspace(-1, 1, 64).reshape(8, 8).roll(step, 0)
                loss = accelerator.forward_backward(
                    model, inputs, inputs.flip(1), torch.nn.functional.mse_loss
                )
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))
            return losses
        """
    )
    cell, _ = launch_on_both(notebook, other)
    assert finish(notebook, cell) == ""
    both = eval(notebook.run("print(run.results)"))
    notebook.run("alone = notebook_launcher(train, num_processes=1, devices='cpu', view='none')")
    (alone,) = eval(notebook.run("print(alone.results)"))
    for losses in both:
        assert losses == pytest.approx(alone, rel=1e-5)
