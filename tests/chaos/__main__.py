"""The chaos itself: what happens, to whom, and what must hold afterwards."""

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.kernels import Kernel
from tests.engines.processes import gone
from tests.waiting import eventually

_VICTIMS = {"rank": 40, "agent": 20, "template": 14, "worker": 14, "kernel": 5, "prepared": 20}
# A prepared template, and one that imports.
_MAX_PREPARED = 2
_STOPPED = {"agent": 3, "template": 2}
_KINDS = ("loop", "collective", "native", "native with the GIL", "loader", "brief", "raises")
_NUM_KERNELS = 3
# From a death until nothing that depended on it is left.
_GONE_SECONDS = 3.0
_EVENTS_A_SETTLING = 6
_EVENTS_A_LINE = 20
# What IPython keeps for a person, and torch for itself; and semaphores of others on this machine:
# those of our ranks begin with na-, but for the moment in which the C library makes one. A loader
# that lost a worker makes some tmp* for a moment, to see whether it may open files.
_ALLOWED = re.compile(r"/sem\.(?!na-)|/tmp\w{8}$|\.ipython|home/\.cache|torchinductor_")
_EXPECTED = {"ok", "LaunchError", "WorkerError", "RunStopped", "KeyboardInterrupt"}


class Chaos:
    """Some kernels, what is done to them, and what was wrong."""

    def __init__(self, seed, sandbox, *, num_kernels=_NUM_KERNELS, imports=""):
        self._random = random.Random(seed)
        self._kernels = []
        self._sandbox = sandbox
        self._events = Counter()
        self._num_kernels = num_kernels
        self._imports = imports
        self.counts = Counter()
        self.wrong = []
        self._shared_before = set(os.listdir("/dev/shm"))
        for name in ("runs", "tmp", "home", "cwd"):
            (sandbox / name).mkdir()

    # ---- kernels ---------------------------------------------------------------------------

    def _fill_up(self):
        while len(self._kernels) < self._num_kernels:
            kernel = Kernel(self._environment(), self._sandbox / "cwd")
            self._kernels.append(kernel)
            self._check(kernel, "a launch in a new kernel", kernel.ask("cells.work()"))
            self._count_files(kernel)

    def _environment(self):
        return {
            **os.environ,
            "NOTEBOOK_ACCEL_RUNS": str(self._sandbox / "runs"),
            "TMPDIR": str(self._sandbox / "tmp"),
            "HOME": str(self._sandbox / "home"),
            "CHAOS_IMPORTS": self._imports,
        }

    # ---- events ----------------------------------------------------------------------------

    def run(self, num_events):
        done = 0
        while done < num_events:
            self._fill_up()
            kernel = self._random.choice(self._kernels)
            try:
                died = self._happen(kernel)
                done += died
                if died and done % _EVENTS_A_LINE == 0:
                    print(f"{done} of {num_events} killed", flush=True)
            except (AssertionError, TimeoutError, OSError, ValueError) as error:
                self._note(kernel, f"{type(error).__name__}: {error}")
                self._drop(kernel)
        for kernel in list(self._kernels):
            self._settle(kernel)
            kernel.end()
            self._expect(kernel, 0, "a kernel that ended")
            self._drop(kernel)
        self._look_for_files()

    def _happen(self, kernel):
        """One event; gives how many processes died of it."""
        moves = {
            self._start_and_kill: 85,
            self._start_and_halt: 10,
            self._interrupt: 8,
            self._stop: 7,
        }
        move = self._random.choices(list(moves), list(moves.values()))[0]
        deaths = move(kernel)
        self._events[kernel] += 1
        if kernel in self._kernels and self._events[kernel] % _EVENTS_A_SETTLING == 0:
            self._settle(kernel)
        return deaths

    def _start_and_kill(self, kernel):
        """Begin a run, and kill something at some moment of it."""
        victim = self._start_and_choose(kernel, _VICTIMS)
        if victim == "kernel":
            return self._kill_kernel(kernel)
        deaths = self._kill_one(kernel, victim)
        self._take_answer(kernel, "start")
        return deaths

    def _start_and_halt(self, kernel):
        """Begin a run, and SIGSTOP its agent or the template at some moment of it."""
        victim = self._start_and_choose(kernel, _STOPPED)
        if candidates := kernel.census()[victim]:
            with suppress(psutil.NoSuchProcess):
                self._random.choice(candidates).suspend()
            self.counts[f"stopped {victim}"] += 1
        self._take_answer(kernel, "start beside one that is stopped")
        return 0

    def _start_and_choose(self, kernel, victims):
        (victim,) = self._random.choices(list(victims), list(victims.values()))
        kernel.send(f"cells.start({self._random.choice(_KINDS)!r}, {self._random.randint(1, 3)})")
        time.sleep(self._random.choice([0.02, 0.1, 0.5, 2.0]) * self._random.random())
        return victim

    @staticmethod
    def _let_go_on(kernel):
        for process in kernel.others():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def _kill_kernel(self, kernel):
        self.counts["kernel"] += 1
        kernel.kill()
        self._let_go_on(kernel)
        self._expect(kernel, 0, "a kernel that was killed")
        self._drop(kernel)
        return 1

    def _kill_one(self, kernel, victim):
        candidates = kernel.census()[victim]
        if not candidates:
            return 0
        chosen = self._random.choice(candidates)
        with suppress(psutil.NoSuchProcess):
            chosen.kill()
        # A large process takes its time to die on a busy machine, and forks nothing meanwhile.
        eventually(lambda: gone([chosen.pid]), within=_GONE_SECONDS, what="a SIGKILL works")
        self.counts[victim] += 1
        return 1

    def _interrupt(self, kernel):
        kernel.send(f"cells.follow({self._random.choice(_KINDS)!r}, 2)")
        time.sleep(self._random.choice([0.05, 0.5]) * self._random.random())
        for _ in range(3):
            kernel.interrupt()
            time.sleep(0.4 * self._random.random())
        self.counts["interrupt"] += 1
        self._take_answer(kernel, "follow")
        return 0

    def _stop(self, kernel):
        self.counts["stop"] += 1
        kernel.ask("cells.stop()")
        return 0

    def _take_answer(self, kernel, what):
        answer = kernel.answer()
        self.counts[f"{what}: {answer}"] += 1
        if answer not in _EXPECTED:
            self._note(kernel, f"{what} gave {answer}")

    # ---- what must hold --------------------------------------------------------------------

    def _settle(self, kernel):
        """End all runs: only the template may be left, and the next launch works."""
        for how in kernel.ask("cells.end()"):
            self._check(kernel, "a run", how)
            self.counts[f"run {how}"] += 1
        self._expect(kernel, 1, "runs that ended")
        self._check(kernel, "the next launch", kernel.ask("cells.work()"))
        self._expect(kernel, 1, "the next launch")
        self._count_files(kernel)

    def _count_files(self, kernel):
        files = kernel.ask("cells.count_files()")
        ours = [name for name in files.values() if not _ALLOWED.search(name)]
        names = Counter(re.sub(r"\d+", "N", name) for name in ours)
        if kernel.files is None:
            kernel.files = names
        elif more := names - kernel.files:
            self._note(kernel, f"more open files than at the start: {dict(more)}")

    def _expect(self, kernel, count, what):
        allowed = count + _MAX_PREPARED * bool(count and self._imports)
        try:
            eventually(lambda: len(kernel.others()) <= allowed, within=_GONE_SECONDS, what="gone")
        except AssertionError:
            for process in kernel.others():
                with suppress(psutil.Error):
                    self._note(kernel, f"left of {what}: {_describe(process)}")

    def _check(self, kernel, what, answer):
        if "WRONG" in answer:
            self._note(kernel, f"{what}: {answer}")

    def _note(self, kernel, text):
        line = f"{text}\n    in kernel {kernel.pid} after {kernel.commands[-8:]}"
        print(f"WRONG {line}", flush=True)
        self.wrong.append(line)

    def _drop(self, kernel):
        if kernel in self._kernels:
            self._kernels.remove(kernel)
        kernel.discard()

    def _look_for_files(self):
        folders = [self._sandbox / name for name in ("tmp", "cwd", "home")]
        left = [path for folder in folders for path in folder.rglob("*")]
        shared = set(os.listdir("/dev/shm")) - self._shared_before
        for path in [*left, *(Path("/dev/shm", name) for name in sorted(shared))]:
            if not _ALLOWED.search(str(path)):
                print(f"WRONG a file is left: {path}", flush=True)
                self.wrong.append(f"a file is left: {path}")


def _describe(process):
    return f"{process.pid} of {process.ppid()}, {process.status()}: {process.cmdline()[-1:]}"


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--events", type=int, default=200, help="how many processes are killed")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--imports", default="transformers", help="what templates import")
    options = parser.parse_args()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    sandbox = Path(tempfile.mkdtemp(prefix="chaos-"))
    began = time.monotonic()
    chaos = Chaos(seed, sandbox, imports=options.imports)
    try:
        chaos.run(options.events)
    finally:
        shutil.rmtree(sandbox, ignore_errors=True)
    for name, count in sorted(chaos.counts.items()):
        print(f"{count:5d}  {name}")
    print(f"{len(chaos.wrong)} things wrong, {time.monotonic() - began:.0f} s, seed {seed}")
    return 1 if chaos.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
