"""The command line ``notebook-accel``, also ``python -m notebook_accel``.

    main --table of commands--> function of a module here --> exit status

Each command is a function of the same name. It gets the arguments after the command's name and
returns the exit status: 0 for success, 1 if a run or a check failed. If it raises one of the
package's errors, ``main`` prints the error on stderr and returns 1 for a failed rank, and 2 for any
other error, as argparse does for bad arguments.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from notebook_accel.errors import NotebookAccelError, WorkerError

# For each command: its module, and what it does.
_COMMANDS = {
    "config": ("settings", "ask for the settings of launches, and save them"),
    "launch": ("launch", "run a script on several ranks"),
    "test": ("sanity", "train a small model as it is configured, and say what works"),
    "join": ("machine", "lend this machine to a launch of a notebook on another one"),
    "env": ("machine", "print versions, devices and settings, for a bug report"),
    "doctor": ("machine", "look for what stops or hurts a launch on this machine"),
    "runs": ("run_commands", "list the runs of all notebooks on this machine"),
    "stop": ("run_commands", "stop a run of a notebook"),
    "logs": ("run_commands", "print what the ranks of a run printed"),
    "estimate-memory": ("model_weights", "estimate the memory that a model needs (by Accelerate)"),
    "merge-weights": ("model_weights", "write sharded weights of FSDP into one file"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, of this process by default, and return its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    name, *rest = given or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale may have no ✓
    try:
        status = _run(name, rest)
        if sys.stdout is not None:
            sys.stdout.flush()
    except NotebookAccelError as error:
        print(f"notebook-accel {name}: {error}", file=sys.stderr)
        return 1 if isinstance(error, WorkerError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `notebook-accel logs RUN | head`
        sys.stderr.close()
        return 141
    except OSError as error:  # a folder that cannot be written, say
        print(f"notebook-accel {name}: {error}", file=sys.stderr)
        return 2
    return status


def _run(name: str, rest: Sequence[str]) -> int:
    if name == "--version":
        print(version("notebook-accel"))
        return 0
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name not in _COMMANDS:
        print(f"notebook-accel: there is no command {name!r}\n{_help()}", file=sys.stderr)
        return 2
    module = import_module(f"{__name__}.{_COMMANDS[name][0]}")
    status: int = getattr(module, name.replace("-", "_"))(rest)
    return status


def _help() -> str:
    rows = (f"  {name:<16} {about}" for name, (_, about) in _COMMANDS.items())
    return "\n".join(
        ("usage: notebook-accel COMMAND ...", "", *rows, "", "notebook-accel COMMAND --help: more")
    )
