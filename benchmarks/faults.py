"""A rank dies, 8 ways: seconds from the event until the launcher has raised.

Two ranks build their Accelerator and meet at a barrier; then rank 1, or both, note the time and
die, while rank 0 waits in a collective. Peer: accelerate's notebook_launcher.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from timing import Measurement, arguments, interleave, median, report, seconds, table

if TYPE_CHECKING:
    from collections.abc import Callable

LAUNCHERS = ("notebook_accel", "accelerate")


class UnpicklableError(Exception):
    """Holds what no pickle takes."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.held = sys._getframe()


def raise_value_error() -> NoReturn:
    """What most often happens."""
    raise ValueError("bad value")


def raise_key_error() -> NoReturn:
    """Nothing special, but the others sit in a collective."""
    raise KeyError("missing")


def raise_unpicklable() -> NoReturn:
    """An exception that cannot travel."""
    raise UnpicklableError


def exit_hard() -> None:
    """No Python code runs after this."""
    os._exit(3)


def exit_softly() -> NoReturn:
    """SystemExit."""
    sys.exit(4)


def die_by(number: int) -> None:
    """A signal, as by the kernel or a fault in native code."""
    os.kill(os.getpid(), number)
    time.sleep(60)


# How it dies, and whether all ranks do.
WAYS: dict[str, tuple[Callable[[], object], bool]] = {
    "ValueError, one rank": (raise_value_error, False),
    "ValueError, all": (raise_value_error, True),
    "KeyError, others in a collective": (raise_key_error, False),
    "os._exit(3)": (exit_hard, False),
    "SIGKILL": (partial(die_by, signal.SIGKILL), False),
    "SIGSEGV": (partial(die_by, signal.SIGSEGV), False),
    "sys.exit(4)": (exit_softly, False),
    "unpicklable exception": (raise_unpicklable, False),
}
COLLECTIVE = "KeyError, others in a collective"


def rank_body(way: str, launcher: str, note: str) -> None:
    """Come up, meet, and die; the rank that lives waits."""
    die, everyone = WAYS[way]
    accelerator = _accelerator(launcher)
    accelerator.wait_for_everyone()  # type: ignore[attr-defined]
    if everyone or accelerator.process_index == 1:  # type: ignore[attr-defined]
        Path(note).write_text(str(time.monotonic()))
        die()
    if way == COLLECTIVE:
        accelerator.wait_for_everyone()  # type: ignore[attr-defined]
    time.sleep(60)


def _accelerator(launcher: str) -> object:
    if launcher == "notebook_accel":
        import notebook_accel

        return notebook_accel.Accelerator()
    import accelerate

    return accelerate.Accelerator(cpu=True)


def launch(launcher: str, way: str, note: str) -> None:
    """Call the launcher; it raises."""
    if launcher == "notebook_accel":
        import notebook_accel

        notebook_accel.notebook_launcher(
            rank_body, (way, launcher, note), num_processes=2, view="none"
        )
    else:
        import accelerate
        from work import free_port

        accelerate.notebook_launcher(
            rank_body, (way, launcher, note), num_processes=2, use_port=str(free_port())
        )


def measure(launcher: str, way: str) -> None:
    """Measure one death in this process, and report it."""
    import torch  # noqa: F401  (what a notebook has imported)

    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "event"
        try:
            launch(launcher, way, str(note))
        except BaseException as error:
            raised, text = time.monotonic(), f"{type(error).__name__}: {error}"
        else:
            report({"failed": "nothing was raised"})
            return
        report(_since(note, raised, text))


def _since(note: Path, raised: float, text: str) -> Measurement:
    if not note.exists():
        return {"failed": f"no rank died: {text[:80]}"}
    return {"seconds": raised - float(note.read_text()), "error": text}


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.one:
        measure(options.one, options.way)
        return
    repeats = 1 if options.quick else options.repeats
    ways = [options.way] if options.way else list(WAYS)
    rows = []
    for way in ways:
        found = interleave(LAUNCHERS, repeats, ["--way", way])
        rows.append({"way": way} | {name: _cell(found[name]) for name in LAUNCHERS})
    print(f"2 ranks; from the event until the launcher has raised; median of {repeats}")
    print(table(rows))


def _cell(measurements: list[Measurement]) -> str:
    value = median(measurements, "seconds")
    return seconds(value) if value is not None else str(measurements[0]["failed"])


if __name__ == "__main__":
    main()
