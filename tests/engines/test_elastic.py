"""Ranks on several machines keep the contract; machines join by a token, and by it alone."""

import contextlib
import os
import re
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist

from notebook_accel import LaunchConfig, LaunchError, RunStopped, WorkerError, wire
from notebook_accel.config.engines import ENGINES
from notebook_accel.launch.engines import machines
from notebook_accel.launch.engines.elastic import join
from notebook_accel.launch.template import handle
from notebook_accel.launch.transport.machine_link import Token
from notebook_accel.launch.view import View
from notebook_accel.rank.this_rank import current
from tests.engines import joined
from tests.engines.contract import BUSY, EngineContract, _join_group
from tests.engines.processes import files_left
from tests.engines.slurm import in_job
from tests.kernel.notebooks import open_notebook
from tests.launches import launch, without_gloo
from tests.ports import free_port
from tests.templates import IMPORT_LITTLE
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _engine(monkeypatch):
    monkeypatch.setitem(ENGINES, joined.NAME, joined.KIND)


@pytest.mark.long
class TestElastic(EngineContract):
    engine = joined.NAME
    prelude = "from tests.engines.joined import register; register()"
    local_world_size = 1
    num_stops = 3

    # What the template or one rank does by itself is the same behind any number of agents.
    test_a_template_that_stops_or_dies_while_forking_is_replaced = None
    test_a_dead_template_hurts_no_run_and_the_next_launch_makes_a_new_one = None
    test_what_is_left_to_do_after_the_return_is_bounded = None
    test_a_daemon_of_a_rank_outlives_other_ranks_and_not_its_own = None


class Waits(View):
    """Takes the command for the other machines from what the person reads.

    Args:
        act: is called with address and token each time that the text comes.
    """

    def __init__(self, act):
        self.texts = []
        self._act = act

    def waits_for_machines(self, text):
        self.texts.append(text)
        found = re.search(r"NOTEBOOK_ACCEL_JOIN_TOKEN=(\S+) notebook-accel join (\S+)", text)
        if found is None:
            assert "waits for" not in text, text
        else:
            self._act(found[2], found[1])


JOIN = f"{IMPORT_LITTLE}import sys; from notebook_accel.launch.engines.elastic import join; "
JOIN += "sys.exit(join(*sys.argv[1:]))"


class OtherMachine:
    """A process that joins, as `notebook-accel join` does."""

    def __init__(self):
        self.process = None

    def join(self, address, token):
        self.run([sys.executable, "-c", JOIN, address, token])

    def run(self, command):
        if self.process is None:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def other():
    machine = OtherMachine()
    yield machine
    if machine.process is not None:
        machine.process.kill()
        machine.process.communicate()


def two_machines(**settings):
    at = {"master_addr": "127.0.0.1", **settings}
    return LaunchConfig(num_nodes=2, num_processes=1, devices="cpu", **at)


def on_two(function, *args, other, block=True, **settings):
    view = Waits(other.join)
    return launch(function, args, config=two_machines(**settings), view=view, block=block)


# ---- a machine is a process of its own -----------------------------------------------------


def test_each_machine_imports_once_what_the_notebook_has_imported(other, tmp_path, monkeypatch):
    def train():
        return "joined_lib" in sys.modules

    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "joined_lib.py").write_text(f"print(0, file=open({str(tmp_path / 'log')!r}, 'a'))")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(handle, "_is_warm", True)
    monkeypatch.setattr(handle, "_followed", [])
    handle.follow([wire.ImportItem("joined_lib")])
    assert [*on_two(train, other=other)] == [True, True]
    # Once in the template of each machine.
    assert (tmp_path / "log").read_text().split() == ["0", "0"]


def test_the_same_cell_on_the_other_machine(other):
    """At a port that both were given, as for Accelerate's launcher."""
    cell = (
        "import sys; from notebook_accel import notebook_launcher; "
        "host, port = sys.argv[1].split(':'); print(notebook_launcher(lambda: 0, num_nodes=2, "
        "node_rank=1, master_addr=host, use_port=port, join_token=sys.argv[2]))"
    )
    port = free_port()

    def run_cell(address, token):
        assert address == f"127.0.0.1:{port}"
        other.run([sys.executable, "-c", cell, address, token])

    run = launch(os.getppid, config=two_machines(use_port=port), view=Waits(run_cell))
    assert run[0] != run[1]
    assert other.process.communicate(timeout=BUSY)[0] == "None\n"


def test_the_handle_comes_before_the_machines(other, monkeypatch):
    def train():
        return os.environ["WORLD_SIZE"]

    def command(run):
        texts = []
        eventually(lambda: texts.extend(run.state.notices) or texts, what="it is said")
        found = re.search(r"NOTEBOOK_ACCEL_JOIN_TOKEN=(\S+) notebook-accel join (\S+)", texts[-1])
        return found[2], found[1]

    config = two_machines()
    stopped = launch(train, config=config, block=False)
    assert (stopped.status, stopped.world_size) == ("starting", 2)
    address, token = command(stopped)
    with pytest.raises(RuntimeError, match="save: no rank runs yet"):
        stopped.save()
    stopped.stop()
    with pytest.raises(RunStopped):
        stopped.wait(BUSY)
    with pytest.raises(LaunchError, match="no notebook waits"):
        join(address, token, tell=lambda _: None)

    late = launch(train, config=config, block=False, timeout=0.5)
    with pytest.raises(TimeoutError):
        late.wait(BUSY)

    run = launch(train, config=config, block=False)
    other.join(*command(run))
    assert run.wait(BUSY).results == ["2", "2"]
    assert "TOKEN" not in "".join(run.state.notices)
    assert other.process.wait(BUSY) == 0

    monkeypatch.setattr("notebook_accel.launch.engines.elastic._JOIN_SECONDS", 0.3)
    alone = launch(train, config=config, block=False)
    with pytest.raises(LaunchError, match=r"1 of 2 machines were there after 0\.3 s"):
        alone.wait(BUSY)
    assert alone.status == "failed"


def test_a_notebook_shows_the_command_until_the_machines_have_joined(other):
    with open_notebook() as notebook:
        notebook.run(
            "from notebook_accel import notebook_launcher\n"
            "def train(): return 1\n"
            "run = notebook_launcher(train, num_nodes=2, num_processes=1, devices='cpu', "
            "master_addr='127.0.0.1', block=False)"
        )
        found = []

        def is_shown():
            found[:] = re.findall(
                r"NOTEBOOK_ACCEL_JOIN_TOKEN=(\S+) notebook-accel join (127[\d.:]+)",
                str(notebook.kernel.widgets),
            )
            return bool(found) and "Stop" in notebook.kernel.buttons

        assert notebook.kernel.listen_until(is_shown, seconds=BUSY)
        assert notebook.run("print(run.status)") == "starting\n"
        other.join(found[0][1], found[0][0])
        assert notebook.run("print(len(run.wait(60).results))") == "2\n"
        assert notebook.kernel.listen_until(
            lambda: "TOKEN" not in str(notebook.kernel.displays), seconds=BUSY
        )


KERNEL = """
import time, sys
from notebook_accel import LaunchConfig
from notebook_accel.launch.view import View
from tests.launches import launch

class Prints(View):
    def waits_for_machines(self, text):
        print(text, flush=True)

config = LaunchConfig(num_nodes=2, num_processes=1, devices="cpu", master_addr="127.0.0.1")
launch(time.sleep, (float(sys.argv[1]),), config=config, view=Prints())
"""


@pytest.mark.parametrize(
    ("seconds", "status", "says"),
    [(600, 1, "the notebook is lost"), (0, 0, "it succeeded")],
    ids=["killed", "exits at once"],
)
def test_a_machine_says_whether_the_notebook_was_lost(seconds, status, says, other):
    command = [sys.executable, "-c", IMPORT_LITTLE + KERNEL, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as kernel:
        shown = Waits(other.join)
        shown.waits_for_machines(kernel.stdout.readline() + kernel.stdout.readline())
        for line in other.process.stderr:
            if "the ranks here train" in line and status:
                kernel.kill()
            last = line
        assert says in last
        assert other.process.wait(BUSY) == status
        kernel.kill()


@pytest.fixture
def files_of_other(tmp_path, monkeypatch):
    """The folder for temporary files of the other machine."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_machine_that_is_lost_ends_the_run(number, other, files_of_other):
    def train():
        _join_group()
        time.sleep(600)

    run = on_two(train, other=other, block=False)
    eventually(lambda: run.status == "running", what="it runs")
    other.process.send_signal(number)
    with pytest.raises(WorkerError) as caught:
        run.wait(BUSY)
    other.process.wait(BUSY)
    assert (caught.value.rank, caught.value.ranks) == (None, [0, 1])
    assert f"on {socket.gethostname()} (127.0.0.1) was lost" in str(caught.value)
    eventually(lambda: not files_left(files_of_other), what="it keeps nothing")


@pytest.mark.long
def test_an_agent_that_is_killed_leaves_no_file(other, files_of_other):
    def train():
        if os.environ["RANK"] == "1":
            assert files_left(os.environ["TMPDIR"]) != []
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(WorkerError, match="SIGKILL"):
        on_two(train, other=other)
    eventually(lambda: not files_left(files_of_other), what="it keeps nothing")


def test_a_machine_that_is_held_up_is_not_lost_and_a_stop_ends_both(other):
    def train():
        _join_group()
        total = torch.tensor(float(os.environ["RANK"]))
        dist.all_reduce(total)
        print("rank", os.environ["RANK"])
        while not current().should_stop():
            current().count_step()
            time.sleep(0.001)
        return float(total), os.getppid()

    run = on_two(train, other=other, block=False)
    # A rank that has counted nothing yet gets one second: on a busy machine it may come later.
    eventually(lambda: all(one.steps for one in run.state.ranks), what="all run")
    other.process.send_signal(signal.SIGSTOP)
    time.sleep(8)
    other.process.send_signal(signal.SIGCONT)
    run.stop()
    (total, one), (other_total, two) = run.wait(BUSY)
    assert (total, other_total) == (1.0, 1.0)
    assert one != two
    assert without_gloo(run.logs()) == "[rank 0] rank 0\n[rank 1] rank 1\n"
    assert other.process.wait(BUSY) == 0


# ---- restarts ------------------------------------------------------------------------------


def test_a_failure_starts_the_ranks_again(other):
    def train(big):
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt)
        _join_group()  # before one of them fails, which soon ends the other, both have printed
        if attempt == "0" and os.environ["RANK"] == "1":
            raise ValueError("bad batch")
        if attempt == "1" and os.environ["RANK"] == "0":
            os._exit(7)
        return attempt, float(big[-1])

    run = on_two(train, torch.full((1_000_000,), 3.0), other=other, max_restarts=2)
    assert run.results == [("2", 3.0), ("2", 3.0)]
    assert run.status == "succeeded"
    for rank in range(2):
        said = [line for line in run.logs(rank).splitlines() if line.startswith("attempt")]
        assert said == ["attempt 0", "attempt 1", "attempt 2"]
    notices = "\n".join(run.state.notices)
    assert "ValueError: bad batch; the ranks are started again, 1 of 2 times" in notices
    assert "exit code 7" in notices


def test_a_machine_whose_rank_ends_long_before_the_others_stays(other):
    def train():
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        if attempt == "0" and rank == "1":
            os._exit(7)
        if attempt == "0":
            try:
                time.sleep(600)
            finally:
                time.sleep(2)  # the agent of the other machine has ended meanwhile
        return attempt

    run = on_two(train, other=other, max_restarts=1)
    assert run.results == ["1", "1"]


def test_restarts_come_to_an_end_and_a_machine_says_that_the_run_failed(other):
    def train():
        raise ValueError(os.environ["TORCHELASTIC_RESTART_COUNT"])

    with pytest.raises(WorkerError, match="ValueError: 1"):
        on_two(train, other=other, max_restarts=1)
    assert "the run has failed: the notebook says why" in other.process.communicate(timeout=BUSY)[1]
    assert other.process.returncode == 1


# ---- a job of Slurm ------------------------------------------------------------------------


def test_srun_has_the_other_nodes_of_a_job_join_and_what_it_says_where_it_fails_is_told(
    tmp_path, monkeypatch
):
    said = in_job(tmp_path, monkeypatch, command="echo 'srun: error: nodes are busy' >&2; exit 1")
    view = Waits(lambda *_: None)
    view.waits_for_machines = view.texts.append
    config = LaunchConfig(num_nodes=2, num_processes=1, devices="cpu")
    with pytest.raises(LaunchError, match=r"had joined\. It wrote:\nsrun: error"):
        launch(lambda: 1, config=config, view=view)
    assert "waits for 1 more machine, which srun starts" in view.texts[0]
    options, _, command = said.read_text().partition(" -- ")
    assert {"--overlap", "--nodes=1", "--ntasks=1", "--exclude=localhost"} <= {*options.split()}
    assert "token" not in command, "other users see it"


# ---- who is let in -------------------------------------------------------------------------


def test_what_is_no_machine_changes_nothing(other):
    """A port scan, garbage, TLS without the secret, and a token of another launch."""
    seen = []

    def disturb(address, token):
        if seen:
            return
        host, _, port = address.rpartition(":")
        at = host, int(port)
        socket.create_connection(at).close()
        with socket.create_connection(at) as garbage:
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(100_000))
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        with anybody.wrap_socket(socket.create_connection(at)) as guess:
            guess.sendall(b"notebook-accel 008" + bytes(16) + bytes(1000))
            assert guess.recv(1) == b""
        start = "A" if token[0] != "A" else "B"
        for wrong in (token[:-2] + "AA", start + token[1:]):
            with pytest.raises(LaunchError) as caught:
                join(address, wrong, tell=lambda _: None)
            seen.append(str(caught.value))
        other.join(address, token)

    # A socket that says nothing stays open all the while.
    run = launch(lambda: 1, config=two_machines(), view=Waits(disturb))
    assert run.results == [1, 1]
    assert "is not the launch that this token is of" in seen[0]
    assert "its token is not the one of this launch" in seen[1]


def test_strangers_cannot_fill_the_open_files_of_the_notebook():
    held = []

    def crowd(address, token):
        host, _, port = address.rpartition(":")
        most = machines._MAX_UNPROVED
        held.extend(socket.create_connection((host, int(port))) for _ in range(most + 8))
        # Closed by the notebook, which the others wait for.
        for one in held[-8:]:
            one.settimeout(BUSY)
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b""
        os.kill(os.getpid(), signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            launch(lambda: 1, config=two_machines(), view=Waits(crowd))
    finally:
        for one in held:
            one.close()
    assert len(held) == machines._MAX_UNPROVED + 8


@pytest.mark.parametrize("how", ["environment", pytest.param("option", marks=pytest.mark.long)])
def test_other_users_cannot_read_the_token_and_the_cell_names_who_joined(how, other, monkeypatch):
    given = []

    def train():
        above = psutil.Process().parents()
        return os.environ.get("NOTEBOOK_ACCEL_JOIN_TOKEN"), [" ".join(p.cmdline()) for p in above]

    def show(address, token):
        given.append(token)
        command = [sys.executable, "-m", "notebook_accel", "join", address]
        if how == "option":
            other.run([*command, "--token", token])
        else:
            with monkeypatch.context() as patch:
                patch.setenv("NOTEBOOK_ACCEL_JOIN_TOKEN", token)
                other.run(command)

    view = Waits(show)
    in_rank, command_lines = launch(train, config=two_machines(), view=view)[1]
    assert in_rank is None
    assert any(" join 127.0.0.1:" in line for line in command_lines)
    assert given[0] not in " ".join(command_lines)
    who = f"{psutil.Process().username()}@{socket.gethostname()} (127.0.0.1)"
    assert view.texts[-1] == f"train: {who} joined"


def test_a_token_is_no_option_of_a_command_line(monkeypatch):
    drawn = [b"\xf8" * 16, b"\x00" * 16]
    monkeypatch.setattr(secrets, "token_bytes", lambda _: drawn.pop(0))
    assert str(Token.new(b"\x00" * 32)).startswith("A")


def test_a_token_lets_in_the_machines_of_its_launch_and_nobody_after(other, tmp_path):
    given = []

    def show(address, token):
        given.append((address, token))
        other.join(address, token)

    def train(go):
        while not go.exists():
            time.sleep(0.01)
        return os.environ["WORLD_SIZE"]

    def runs_on(size):
        eventually(lambda: (run.world_size, run.status) == (size, "running"), what="it runs")
        with pytest.raises(LaunchError, match="no notebook waits at"):
            join(*given[0], tell=lambda _: None)

    config = two_machines(max_restarts=1)
    go = tmp_path / "go"
    run = launch(train, (go,), config=config, view=Waits(show), block=False)
    runs_on(2)
    other.process.kill()
    runs_on(1)
    go.touch()
    assert run.wait(BUSY).results == ["1"]
    assert (run.world_size, run.status) == (1, "succeeded")


def test_an_interrupt_ends_the_wait_for_machines(monkeypatch):
    ports = []

    def press(address, token):
        ports.append(int(address.rpartition(":")[2]))
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        launch(lambda: 1, config=two_machines(), view=Waits(press))

    def is_closed():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", ports[0])) != 0

    eventually(is_closed, within=BUSY, what="the port is closed")
    assert caught.value.__traceback__ is not None, "IPython keeps it, and what it holds"


def test_a_name_as_the_address_gives_collectives_the_interface_by_which_machines_join(
    other, monkeypatch
):
    loopback = SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")
    monkeypatch.setattr(machines.psutil, "net_if_addrs", lambda: {"eth7": [loopback]})

    def seen():
        return os.environ["GLOO_SOCKET_IFNAME"], torch.get_float32_matmul_precision()

    env = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    run = on_two(seen, other=other, master_addr="localhost", env=env)
    # The other machine is a process of its own. What torch reads as it loads counts on both.
    assert run.results == [("eth7", "high"), ("lo", "high")]


def test_an_address_that_is_not_this_machines():
    with pytest.raises(LaunchError, match=r"192\.0\.2\.77.*cannot be listened at"):
        launch(lambda: 1, config=two_machines(master_addr="192.0.2.77"))


def test_the_address_without_a_default_route_is_one_that_others_reach(monkeypatch):
    unreachable = Mock(side_effect=OSError("Network is unreachable"))
    monkeypatch.setattr(machines.socket.socket, "connect", unreachable)
    address = SimpleNamespace(family=socket.AF_INET, address="10.77.0.1")
    loopback = SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")
    found = {"lo": [loopback], "eth0": [address]}
    monkeypatch.setattr(machines.psutil, "net_if_addrs", lambda: found)
    assert machines.own_addresses() == ["10.77.0.1"]
