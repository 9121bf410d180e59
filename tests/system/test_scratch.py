"""What multiprocessing leaves when its processes are killed is removed with the run."""

import importlib
import multiprocessing
import multiprocessing.synchronize
import os
import signal
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path

from notebook_accel.system import processes

_RUN = "20260101-000000-beef00"


def _leave(said):
    """Be killed with a socket and a semaphore in the file system."""
    processes.use_scratch(_RUN)
    listener = Listener()
    shared = Path("/dev/shm")
    # As it was before another test imported joblib, which names semaphores in its own way.
    importlib.reload(multiprocessing.synchronize)
    name = multiprocessing.synchronize.SemLock._make_name()
    (shared / f"sem.{name[1:]}").touch()
    said.send((listener.address, name))
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_of_a_killed_process(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        context = multiprocessing.get_context("fork")
        heard, said = context.Pipe()
        process = context.Process(target=_leave, args=(said,))
        process.start()
        address, name = heard.recv()
        process.join()
        left = [Path(address), Path(f"/dev/shm/sem.{name[1:]}")]
        assert all(path.exists() for path in left)
        assert Path(address).is_relative_to(folder)
        # Between two that cannot be removed, as those of another user: one of them comes first.
        stubborn = [Path(f"/dev/shm/torch_{process.pid}_{number}_0") for number in (0, 2)]
        tensor = Path(f"/dev/shm/torch_{process.pid}_1_0")
        stubborn[0].mkdir()
        tensor.touch()
        stubborn[1].mkdir()
        left.append(tensor)
        # One that lives has got the number of one that is dead.
        of_another = Path(f"/dev/shm/torch_{os.getpid()}_1_0")
        of_another.touch()
        of_another_agent = processes.scratch_folder(_RUN, os.getpid())
        of_another_agent.mkdir()
        processes.remove_scratch(_RUN, process.pid, used_by=[process.pid, os.getpid()])
        assert not any(path.exists() for path in left)
        assert of_another.exists()
        of_another.unlink()
        for path in stubborn:
            path.rmdir()
        assert os.listdir(folder) == [of_another_agent.name]
