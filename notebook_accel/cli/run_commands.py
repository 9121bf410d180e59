"""Commands about the runs of notebooks: ``runs``, ``stop`` and ``logs``.

``stop`` writes a request into the run's folder, which the kernel that started it reads.
"""

from __future__ import annotations

import contextlib
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence

from notebook_accel.errors import ConfigError, LaunchError
from notebook_accel.launch import run_list
from notebook_accel.launch.control.run_folder import RunFolder, run_folders
from notebook_accel.launch.run import Run
from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import as_shown, one_line, plain_text
from notebook_accel.launch.view.summary import elapsed, num_ranks
from notebook_accel.system.own_files import open_to_read

_LOOK_SECONDS = 0.2
# A kernel looks for requests five times a second; in C code that holds the GIL it does not.
_PATIENCE_SECONDS = 10.0


def runs(arguments: Sequence[str]) -> int:
    """``notebook-accel runs [-n N]``: print the latest N runs (default 20), the newest last."""
    parser = ArgumentParser(prog="notebook-accel runs", description="List runs, the newest last.")
    parser.add_argument("-n", type=int, default=20, metavar="N", help="how many; 20 unless given")
    found = run_list.runs(everywhere=True)[-max(1, parser.parse_args(arguments).n) :]
    rows: list[tuple[str, ...]] = [("ID", "STATUS", "STARTED", "TOOK", "RANKS", "NAME", "NOTEBOOK")]
    for state in (run.state for run in found):
        started, took = wording.moment(state.started), wording.span(elapsed(state, time.time()))
        name = one_line(state.name, 40)
        rows.append(
            (state.run, state.status, started, took, num_ranks(state), name, state.notebook)
        )
    print("\n".join(wording.aligned(rows)))
    return 0


def stop(arguments: Sequence[str]) -> int:
    """``notebook-accel stop [RUN]``: ask a run to stop, and wait until its kernel has the request.

    ConfigError unless RUN ends one unfinished run's id; LaunchError after 10 seconds.
    """
    parser = ArgumentParser(
        prog="notebook-accel stop",
        description="Stop a run as its Stop button does: the ranks leave at the same step. Once "
        "more interrupts them.",
    )
    _add_run(parser, "the one that goes on")
    parser.add_argument("--kill", action="store_true", help="end the ranks now")
    typed = parser.parse_args(arguments)
    run = _chosen(
        typed.run, [run for run in run_list.runs(everywhere=True) if not run.state.has_ended]
    )
    asked = "kill" if typed.kill else "stop"
    if typed.kill:
        run.kill()
    else:
        run.stop()
    folder = RunFolder(run.log_dir)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while folder.has_left(asked) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        # In this order: a request that is left after the end was not taken.
        if run_list.read_run(run.id).state.has_ended and folder.take(asked) is not None:
            print(f"run {run.id} of {run.name} has ended meanwhile")
            return 0
    if folder.has_left(asked):
        raise LaunchError(
            f"the keeper of run {run.id} does not take it: is that process stopped?"
            if run.state.detached
            else f"nobody has heard it: the kernel of run {run.id} is stopped or busy with code "
            "that holds Python's lock, or runs the function itself (engine='inline'). Interrupt "
            "the kernel"
        )
    print(f"run {run.id} of {run.name} {'ends' if typed.kill else 'stops'}")
    return 0


def logs(arguments: Sequence[str]) -> int:
    """``notebook-accel logs [RUN] [-f] [--rank RANK]``: print output so far, or to the end (-f).

    RUN is the end of an id; without it, the newest run. ConfigError for no such run or rank.
    """
    parser = ArgumentParser(
        prog="notebook-accel logs", description="Print what the ranks of a run printed."
    )
    _add_run(parser, "the newest")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--rank", type=int, help="of this rank alone")
    typed = parser.parse_args(arguments)
    found = run_list.runs(everywhere=True)
    run = _chosen(typed.run, found if typed.run else found[-1:])
    if typed.rank is not None and not 0 <= typed.rank < run.world_size:
        raise ConfigError(
            f"--rank {typed.rank}: run {run.id} has the ranks 0 to {run.world_size - 1}"
        )
    if not typed.follow or run.state.has_ended:
        text = run.logs(typed.rank)
        print(text or f"run {run.id} of {run.name} has printed nothing\n", end="")
        return 0
    ranks = range(run.world_size) if typed.rank is None else [typed.rank]
    starts = {rank: run.state.ranks[rank].log_start or 0 for rank in ranks}
    while True:
        # In this order: what is printed before the end is there once the end is known.
        has_ended = run_list.find_run(run.id).state.has_ended
        for rank in ranks:
            label = f"[rank {rank}] " if typed.rank is None else ""
            starts[rank] = _print_new(RunFolder(run.log_dir), rank, starts[rank], label)
        sys.stdout.flush()
        if has_ended:
            return 0
        time.sleep(_LOOK_SECONDS)


def _print_new(folder: RunFolder, rank: int, start: int, label: str) -> int:
    """Print complete lines from byte ``start`` on; return the next ``start``."""
    folder.check()
    with contextlib.suppress(FileNotFoundError), open_to_read(folder.path, rank) as file:
        file.seek(start)
        data = file.read()
        size = data.rfind(b"\n") + 1
        # Not splitlines(): a form feed ends no line.
        for line in data[:size].decode(errors="replace").split("\n")[:-1]:
            print(label + plain_text(as_shown(line)))
        return start + size
    return start


def _add_run(parser: ArgumentParser, default: str) -> None:
    about = f"the run's id, or the end of it; {default}, if there is none"
    parser.add_argument("run", nargs="?", metavar="RUN", help=about)


def _chosen(text: str | None, found: Sequence[Run]) -> Run:
    """Return the only run whose id ends with ``text`` (None: any); else ConfigError."""
    fitting = [run for run in found if text is None or run.id.endswith(text)]
    if len(fitting) == 1:
        return fitting[0]
    asked = "that goes on" if text is None else f"{text!r}"
    if not fitting:
        where = run_folders()[:1] and "; `notebook-accel runs` lists those that are there"
        raise ConfigError(f"there is no run {asked}{where or ''}")
    several = ", ".join(run.id for run in fitting)
    raise ConfigError(f"there are several runs {asked}: name one of {several}")
