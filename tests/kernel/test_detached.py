"""Runs that outlive their kernel: launched detached, attached from another kernel, ended there."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from notebook_accel.cli import main, run_commands
from tests.engines.processes import files_left, gone
from tests.kernel.notebooks import SLOW, open_notebook
from tests.waiting import eventually

_FUNCTIONS = """
import time
from pathlib import Path
import notebook_accel
from notebook_accel import Accelerator, notebook_launcher

class Weights:
    def __init__(self, value):
        self.value = value

def train(folder):
    accelerator = Accelerator()
    rank = accelerator.process_index
    print(f"begun {rank}")
    accelerator.log({"loss": 0.5}, step=1)
    (folder / f"begun{rank}").touch()
    while not (folder / "go").exists() and not accelerator.should_stop:
        time.sleep(0.01)
    print(f"went on {rank}")
    return Weights(rank + 40), [rank] * 100_000
"""


@pytest.fixture(scope="module")
def other():
    with open_notebook() as other:
        other.run("import os, notebook_accel\nfrom notebook_accel.launch import run_list")
        yield other


@pytest.fixture
def later(notebook, other):
    """Another notebook of the same user, which knows no run of the tests before."""
    folder = os.environ["NOTEBOOK_ACCEL_RUNS"]
    other.run(f"run_list._known.clear()\nos.environ['NOTEBOOK_ACCEL_RUNS'] = {folder!r}")
    return other


def keepers(notebook):
    """The processes that keep detached runs."""
    found = []
    for one in notebook.others():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "keeper import serve" in str(one.cmdline()):
                found.append(one)
    return found


def launched(notebook, folder):
    """A detached run of two ranks that are in the function; gives its id."""
    notebook.run(f"{_FUNCTIONS}folder = Path({str(folder)!r})")
    launch = "run = notebook_launcher(train, (folder,), 2, block=False, detach=True, view='none')"
    run_id = notebook.value(f"{launch}\nrun.id")
    begun = [folder / "begun0", folder / "begun1"]
    eventually(lambda: all(one.exists() for one in begun), within=SLOW, what="both ranks train")
    return run_id


def test_a_detached_run_survives_the_death_of_its_kernel(notebook, later, tmp_path):
    run_id = launched(notebook, tmp_path)
    kernel = notebook.pid
    os.kill(kernel, signal.SIGKILL)
    eventually(lambda: gone([kernel]), within=SLOW, what="the kernel is dead")
    assert "running" in later.run("print(notebook_accel.runs(everywhere=True))")
    later.run(f"run = notebook_accel.attach({run_id!r}, view='none')")
    # Its keeper may not have heard from the ranks by now.
    later.run("import time\nwhile run.status == 'starting': time.sleep(0.01)")
    assert later.value("run.status") == "running"
    (tmp_path / "go").touch()
    results = later.value("[(one.value, len(rest)) for one, rest in run]")
    assert results == [(40, 100_000), (41, 100_000)]
    logs = later.value("run.logs()")
    for words in ("begun 0", "begun 1", "went on 0", "went on 1"):
        assert words in logs
    assert later.value("[row['value'] for row in run.metrics]") == [0.5]
    notebook.expect(0, but=kernel, within=SLOW)


def test_its_ranks_have_what_the_notebook_imported(notebook, tmp_path):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "kept_lib.py").write_text(f"print(0, file=open({str(tmp_path / 'log')!r}, 'a'))")
    notebook.run(f"import sys; sys.path.append({str(folder)!r})")
    notebook.run("from notebook_accel import notebook_launcher\nimport kept_lib")
    notebook.run("def has():\n    import sys\n    return 'kept_lib' in sys.modules")
    launch = "notebook_launcher(has, (), 2, block=False, detach=True, view='none')"
    assert notebook.value(f"[*{launch}]") == [True, True]
    # In the kernel, and in the templates of the kernel, which a detached run does not wait for, and
    # of the keeper.
    read = (tmp_path / "log").read_text
    eventually(lambda: read().split() == ["0", "0", "0"], within=SLOW, what="three have it")


def test_a_later_kernel_stops_it_and_nothing_is_left(notebook, later, tmp_path):
    run_id = launched(notebook, tmp_path)
    notebook.manager.restart_kernel(now=False)
    notebook.kernel.client.wait_for_ready(timeout=SLOW)
    later.run(f"run = notebook_accel.attach({run_id!r}, view='widgets')")
    assert " in train" in later.run("print(run.stacks())")
    later.run("run.stop()")
    assert later.value("[one.value for one, _ in run.wait()], run.status") == ([40, 41], "stopped")
    notebook.expect(0, but=notebook.pid, within=SLOW)
    later.expect(0, but=later.pid, within=SLOW)
    left = {entry.name for entry in (tmp_path / "runs" / run_id).iterdir()}
    assert not [name for name in left if name.startswith(".") or name.endswith(".part")], left
    assert files_left(os.environ["TMPDIR"]) == []
    # Of a run that has ended, any kernel has the results still.
    notebook.run("import notebook_accel")
    attached = f"run = notebook_accel.attach({run_id!r})"
    assert notebook.value(f"{attached}\nrun[1][0].value") == 41
    assert "went on 0" in notebook.value(f"notebook_accel.find_run({run_id!r}).logs(0)")


@pytest.mark.long
def test_a_launch_that_is_interrupted_leaves_nothing(notebook, tmp_path):
    notebook.run(f"{_FUNCTIONS}folder = Path({str(tmp_path)!r})")
    cell = notebook.start("notebook_launcher(train, (folder,), 2, block=False, detach=True)")
    eventually(lambda: keepers(notebook), within=SLOW, what="the keeper has started")
    notebook.interrupt()
    assert notebook.finish(cell).status == "error"
    eventually(lambda: not keepers(notebook), within=SLOW, what="the keeper has ended")
    notebook.expect(1, but=notebook.pid, within=SLOW)  # the kernel's own template
    runs = tmp_path / "runs"
    assert not runs.exists() or list(runs.iterdir()) == []


@pytest.mark.long
def test_the_command_line_knows_a_detached_run(notebook, tmp_path):
    run_id = launched(notebook, tmp_path)
    os.kill(notebook.pid, signal.SIGKILL)
    command = [sys.executable, "-m", "notebook_accel"]
    listed = subprocess.run([*command, "runs"], capture_output=True, text=True, check=True)
    assert f"{run_id}  running" in listed.stdout
    with subprocess.Popen([*command, "logs", "-f"], stdout=subprocess.PIPE, text=True) as logs:
        subprocess.run([*command, "stop", run_id[-6:]], check=True, timeout=SLOW)
        said, _ = logs.communicate(timeout=SLOW)
    assert {"begun 0", "begun 1", "went on 0", "went on 1"} <= {
        line.partition("] ")[2] for line in said.splitlines()
    }
    notebook.expect(0, but=notebook.pid, within=SLOW)


@pytest.mark.long
def test_a_failure_and_a_killed_keeper_are_told(notebook, tmp_path):
    run_id = launched(notebook, tmp_path)
    (keeper,) = keepers(notebook)
    keeper.kill()
    assert "its keeper" in notebook.fails("run.wait()")
    notebook.expect(1, but=notebook.pid, within=SLOW)  # the kernel's own template
    assert "keeper" in notebook.fails(f"notebook_accel.attach({run_id!r})[0]")
    notebook.run(
        "class Odd(Exception):\n    pass\n"
        "def fails():\n    raise Odd('as meant')\n"
        "run = notebook_launcher(fails, (), 2, block=False, detach=True, view='none')"
    )
    text = notebook.fails("run.wait()")
    assert "Odd" in text
    assert "as meant" in text
    assert "attach(" in text


@pytest.mark.long
def test_errors_say_what_to_do(notebook, tmp_path):
    notebook.run(f"{_FUNCTIONS}folder = Path({str(tmp_path)!r})")
    launch = "notebook_launcher(train, (folder,), 2, detach=True"
    assert "block=False" in notebook.fails(f"{launch})")
    assert "session=True" in notebook.fails(f"{launch}, block=False, session=True)")
    assert "engine='local'" in notebook.fails(f"{launch}, block=False, engine='inline')")
    assert "engine='local'" in notebook.fails(f"{launch}, block=False, num_nodes=2)")
    assert "devices" in notebook.fails(f"{launch}, block=False, devices=[99])")
    notebook.expect(1, but=notebook.pid, within=SLOW)
    assert "there is no run" in notebook.fails("notebook_accel.attach('20260101-000000-abcdef')")
    notebook.run("held = notebook_launcher(train, (folder,), 1, block=False, view='none')")
    assert "is not detached" in notebook.fails("notebook_accel.attach(held.id)")
    notebook.run("held.kill()")


def test_a_keeper_that_is_stopped_or_has_ended_is_named(
    notebook, later, tmp_path, monkeypatch, capsys
):
    run_id = launched(notebook, tmp_path)
    (keeper,) = keepers(notebook)
    keeper.suspend()
    # Nobody waits for ten seconds here.
    monkeypatch.setattr(run_commands, "_PATIENCE_SECONDS", 1.0)
    assert main(["stop", run_id])
    assert "the keeper of run" in capsys.readouterr().err
    later.run("from notebook_accel.launch import detached\ndetached._ANSWER_SECONDS = 1.0")
    assert "gives no answer" in later.fails(f"notebook_accel.attach({run_id!r})")
    later.run("detached._ANSWER_SECONDS = 10.0")
    stop = [sys.executable, "-m", "notebook_accel", "stop", run_id]
    (tmp_path / "runs" / run_id / ".stop").unlink()
    with subprocess.Popen(stop, stdout=subprocess.PIPE, text=True) as asked:
        eventually((tmp_path / "runs" / run_id / ".stop").exists, within=SLOW, what="it is asked")
        keeper.kill()
        said, _ = asked.communicate(timeout=SLOW)
    assert "has ended meanwhile" in said


def delete(folder):
    """All of ``folder`` at once: the keeper writes and renames files in it meanwhile."""
    shutil.rmtree(folder.rename(folder.with_name("deleted")))


def test_a_run_whose_folder_was_deleted_is_found_and_has_its_result(notebook, later, tmp_path):
    run_id = launched(notebook, tmp_path)
    (keeper,) = keepers(notebook)
    assert keeper.cmdline()[-2:] == [run_id, "train"]
    folder = tmp_path / "runs" / run_id
    delete(tmp_path / "runs")
    eventually((folder / "config.yaml").exists, within=SLOW, what="its folder is there again")
    listed = "[(run.id, run.status) for run in notebook_accel.runs(everywhere=True)]"
    assert later.value(listed) == [(run_id, "running")]
    later.run(f"run = notebook_accel.attach({run_id!r}, view='none')")
    (tmp_path / "go").touch()
    assert later.value("run[1][0].value") == 41


def test_all_who_ask_for_stacks_have_them_and_a_kill_reaches_a_run_without_a_folder(
    notebook, tmp_path
):
    launched(notebook, tmp_path)
    # The keeper, of a busy machine, answers one after the other.
    notebook.run("from notebook_accel.launch import detached; detached._STACKS_SECONDS = 100.0")
    code = """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(run.stacks) for _ in range(3)]
        [one.result().count("in train") for one in asked]
    """
    assert notebook.value(code) == [2, 2, 2]

    def file_took_its_place():
        delete(tmp_path / "runs")
        with contextlib.suppress(FileExistsError):  # the keeper made it anew
            (tmp_path / "runs").touch(exist_ok=False)
        return (tmp_path / "runs").is_file()

    eventually(file_took_its_place, within=SLOW, what="a file where the folder was")
    notebook.run("run.kill()")
    notebook.fails("run.wait()")
    eventually(lambda: not keepers(notebook), within=SLOW, what="the keeper has ended")


@pytest.mark.long
def test_a_keeper_that_waited_for_stacks_in_vain_says_so_and_answers_again_soon(notebook, tmp_path):
    launched(notebook, tmp_path)
    eventually(lambda: notebook.value("run.pids"), within=SLOW, what="its processes are known")
    agent = psutil.Process(notebook.value("run.pids[0]")).parent()
    agent.suspend()
    for _ in range(2):
        assert "its agent gave no answer" in notebook.value("run.stacks()")
    agent.resume()
    notebook.run("run.kill()")
    notebook.fails("run.wait()")


@pytest.fixture
def small(notebook, tmp_path):
    """A disk of 4 MB for the notebook's runs."""
    if os.getuid() != 0:
        pytest.skip("a file system of one's own needs root")
    path = tmp_path / "small"
    path.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(path)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        notebook.run(f"import os; os.environ['NOTEBOOK_ACCEL_RUNS'] = {str(path / 'runs')!r}")
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk):
    with contextlib.suppress(OSError), open(disk / "filling", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_at_the_end_loses_no_verdict_and_names_itself(notebook, later, small, tmp_path):
    later.run(f"import os; os.environ['NOTEBOOK_ACCEL_RUNS'] = {str(small / 'runs')!r}")
    run_id = launched(notebook, tmp_path)
    fill(small)
    (tmp_path / "go").touch()
    assert "disk full" in notebook.fails("run.wait()[0]")
    eventually(lambda: not keepers(notebook), within=SLOW, what="the keeper has ended")
    later.run(f"run = notebook_accel.attach({run_id!r}, view='none')")
    assert later.value("run.status") == "succeeded"
    assert "disk full: what rank 0 returned is lost" in later.fails("run[0]")


@pytest.mark.parametrize("end", ["run.stop(3.5)", "run.kill()"])
def test_a_run_can_be_ended_on_a_full_disk(notebook, small, tmp_path, end):
    launched(notebook, tmp_path)
    fill(small)
    notebook.run(end)
    eventually(lambda: not keepers(notebook), within=SLOW, what="the keeper has ended")
    notebook.run("run._call.ended.wait(30)")
    assert notebook.value("run.status") == "stopped"
