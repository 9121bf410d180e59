"""Ranks on a Ray cluster of two nodes keep the contract, and come to a kernel.

Run by: make test-ray.
"""

import os
import re
import time
import uuid
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import pytest

from tests.engines.contract import EngineContract
from tests.engines.processes import marked
from tests.kernel.notebooks import MARK, SLOW, open_notebook
from tests.waiting import eventually

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(400)

_OF_CLUSTER = uuid.uuid4().hex


@pytest.fixture(scope="module", autouse=True)
def cluster():
    from ray._private import services
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, _OF_CLUSTER)
        # It kills what runs on a machine whose memory others have filled.
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        # A busy machine takes longer than the 30 s that Ray gives a node and its agents.
        patch.setenv("RAY_agent_register_timeout_ms", "300000")
        patch.setattr(services, "get_node", partial(_patiently, services.get_node))
        head = {"num_cpus": 4, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=4)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def _patiently(get_node: Any, *args: Any) -> Any:
    found = []

    def is_there():
        with suppress(RuntimeError):
            found.append(get_node(*args))
        return bool(found)

    eventually(is_there, within=300, what="a node has started")
    return found[0]


def on_nodes() -> list[psutil.Process]:
    found = []
    for process in marked(MARK, _OF_CLUSTER):
        try:
            served = re.search(r"serve\(\d+, (\d+)\)$", process.cmdline()[-1])
            if served is not None and int(served[1]) != os.getpid():
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return found


class TestRay(EngineContract):
    engine = "ray"
    # A rank has one core, as Ray has set aside for it.
    local_world_size = 1_000_000

    # What the template or one rank does by itself is the same behind any number of agents.
    test_a_template_that_stops_or_dies_while_forking_is_replaced = None
    test_a_dead_template_hurts_no_run_and_the_next_launch_makes_a_new_one = None
    test_what_is_left_to_do_after_the_return_is_bounded = None
    test_a_daemon_of_a_rank_outlives_other_ranks_and_not_its_own = None
    # The nodes' processes are no children of the kernel: see below.
    test_a_killed_kernel_leaves_nobody = None

    @pytest.fixture(autouse=True)
    def _on_both_nodes(self, monkeypatch):
        spread = partial(ray.util.placement_group, strategy="SPREAD")
        monkeypatch.setattr(ray.util, "placement_group", lambda bundles, strategy: spread(bundles))

    def alive(self) -> list[psutil.Process]:
        return [*super().alive(), *on_nodes()]


# ---- from a kernel -------------------------------------------------------------------------


@pytest.fixture
def notebook(cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with open_notebook() as notebook:
        notebook.run(
            "from notebook_accel import *\nimport os, time, torch\nfrom pathlib import Path"
        )
        yield notebook
    eventually(lambda: not on_nodes(), within=SLOW, what="nobody is left on the nodes")


# Five ranks need both nodes.
LAUNCH = "run = notebook_launcher(train, {arguments}5, engine='ray', devices='cpu'{options})"
LOOP = """
    def train(path):
        Accelerator().reduce(torch.ones(1))
        Path(path).touch()
        time.sleep(600)
"""


def test_results_of_both_nodes_come_to_the_kernel(notebook):
    notebook.run(
        """
        class Point:
            def __init__(self, x): self.x = x
        def train():
            total = Accelerator().reduce(torch.ones(1))
            facts = int(os.environ["LOCAL_WORLD_SIZE"]), torch.get_num_threads()
            return Point(float(total)), facts
        """
    )
    notebook.run(LAUNCH.format(arguments="(), ", options=""))
    assert notebook.run("print([type(p) is Point and p.x for p, _ in run])") == f"{[5.0] * 5}\n"
    assert notebook.run("print(sorted(facts for _, facts in run))") == (
        "[(1, 1), (4, 1), (4, 1), (4, 1), (4, 1)]\n"
    )
    refused = notebook.fails("notebook_launcher(train, (), 99, engine='ray', devices='cpu')")
    assert "num_processes=99, and the Ray cluster has 8 CPUs" in refused


def test_a_launch_that_waits_for_room_says_so_and_keeps_none(notebook, cluster, tmp_path):
    @ray.remote(num_cpus=4)
    class Holder:
        def hold(self):
            return

    holders = [Holder.remote() for _ in range(2)]
    ray.get([holder.hold.remote() for holder in holders], timeout=SLOW)
    try:
        cell = notebook.start("notebook_launcher(lambda: 1, (), 2, engine='ray', devices='cpu')")

        def is_said():
            texts = [str(d["data"].get("text/plain")) for d in notebook.kernel.displays.values()]
            return any("waits for 2 CPUs of the Ray cluster" in text for text in texts)

        assert notebook.kernel.listen_until(is_said, seconds=SLOW), notebook.kernel.displays
        notebook.interrupt()
        reply = notebook.finish(cell, timeout=20)
        assert "KeyboardInterrupt" in "\n".join(reply.traceback)
    finally:
        for holder in holders:
            ray.kill(holder)
    eventually(
        lambda: ray.available_resources().get("CPU") == 8, within=SLOW, what="all CPUs are free"
    )


def test_trials_of_a_sweep_begin_as_the_cluster_has_room(notebook):
    notebook.run(
        """
        def train(lr):
            accelerator = Accelerator()
            begin = time.time()
            for step in range(5):
                accelerator.log({"loss": float(accelerator.reduce(torch.ones(1))) * lr}, step=step)
                time.sleep(0.1)
            return begin, time.time()
        """
    )
    asked = "metric='loss', engine='ray', devices='cpu'"
    refused = notebook.fails(f"sweep(train, {{'lr': [1]}}, num_processes=30, {asked})")
    assert "num_processes=30, and the Ray cluster has room for 8 ranks" in refused
    notebook.run(f"s = sweep(train, {{'lr': [0.4, 0.1, 0.3, 0.2]}}, num_processes=3, {asked})")
    assert notebook.run("print([run.status for run in s], s.best.state.arguments)") == (
        "['succeeded', 'succeeded', 'succeeded', 'succeeded'] lr=0.1\n"
    )
    # Of 8 places three ranks each: two trials at a time, no more.
    overlaps = notebook.run(
        """
        times = [run[0] for run in s]
        print(max(sum(b <= t < e for b, e in times) for t, _ in times))
        """
    )
    assert overlaps == "2\n"


def test_a_kernel_that_dies_leaves_nobody_on_the_nodes(notebook, tmp_path):
    notebook.run(LOOP)
    path = tmp_path / "begun"
    notebook.start(LAUNCH.format(arguments=f"({str(path)!r},), ", options=""))
    eventually(path.exists, within=SLOW, what="the ranks train")
    assert len(on_nodes()) == 2 + 2 + 5
    os.kill(notebook.pid, 9)
    eventually(lambda: not on_nodes(), within=SLOW, what="nobody is left on the nodes")


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_node_that_dies(max_restarts, notebook, cluster, tmp_path):
    notebook.run(
        """
        def train(folder):
            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            loader = accelerator.prepare(torch.utils.data.DataLoader(range(100)))
            start = accelerator.resume_or_start(folder)
            for step, batch in enumerate(loader, start.batch):
                if accelerator.num_processes == 5 and step == 3:
                    accelerator.save_state()
                    if accelerator.is_main_process:
                        Path(folder, "begun").touch()
                    time.sleep(600)
            return start.batch > 0, accelerator.num_processes
        """
    )
    folder = tmp_path / "checkpoints-of-all"
    folder.mkdir()
    options = f", max_restarts={max_restarts}"
    cell = notebook.start(LAUNCH.format(arguments=f"({str(folder)!r},), ", options=options))
    eventually((folder / "begun").exists, within=SLOW, what="the ranks train")
    (node,) = cluster.worker_nodes
    died = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    try:
        reply = notebook.finish(cell, timeout=SLOW)
        error = "\n".join(reply.traceback)
        if max_restarts:
            assert error == ""
            resumed = eval(notebook.run("print(run.results)"))
            assert resumed in ([(True, 1)], [(True, 4)] * 4)
        else:
            assert time.monotonic() - died < 20
            assert re.search(r"on \S+ \([\d.]+\) was lost", error), error
    finally:
        cluster.add_node(num_cpus=4)
