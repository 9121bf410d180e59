"""The magics ``%%accelerate``, which runs a cell on ranks, and ``%accelerate``, which has commands.

``%load_ext notebook_accel`` registers both.
"""

# IPython's decorators carry no types.
# mypy: disable-error-code="no-untyped-call, untyped-decorator"

from __future__ import annotations

import ast
import re
import shlex
import unicodedata
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

from notebook_accel.config import LaunchConfig, resolve, settings_of
from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch.doctor import as_lines, examine
from notebook_accel.launch.payload.cells import CellSource
from notebook_accel.launch.run import Run
from notebook_accel.launch.scripts import script_of_cells
from notebook_accel.launch.template.handle import imports_line
from notebook_accel.launch.text.terminal_text import plain_text
from notebook_accel.notebook import session, tracebacks
from notebook_accel.notebook.cell_setup import EVERYWHERE, run_everywhere
from notebook_accel.notebook.clicks import find_kernel
from notebook_accel.notebook.picker import config_picker
from notebook_accel.notebook.session import NotebookSession
from notebook_accel.notebook.warming import prepare
from notebook_accel.notebook.worker import CellCall
from notebook_accel.render.markup import lines_to_markup

# ---- What Tab offers in a line of the magic: commands, options, precisions, and names. IPython
# asks a completer by the first word of the line, and takes of its answer what begins with the word
# at the cursor.


def complete_magic(shell: Any) -> None:
    """Have Tab complete lines of the magics, with variables of the notebook and its session."""

    def offer(_shell: Any, event: Any) -> Sequence[str]:
        words = event.text_until_cursor.removesuffix(event.symbol).replace("=", " ").split()
        command = words[1] if len(words) > 1 else ""
        if event.symbol.startswith("-"):
            name = "accelerate" if words[:1] == ["%%accelerate"] else f"_{command}"
            magic: Any = getattr(AccelerateMagics, "_start" if name == "_restart" else name, None)
            return _options(magic.parser) if hasattr(magic, "parser") else []
        if words == ["%accelerate"]:
            return [*_COMMANDS, "--help"]
        if words[-1:] in (["--mixed-precision"], ["--mixed_precision"]):
            return [*settings_of(LaunchConfig)["mixed_precision"].choices]
        running = session.current_session()
        return sorted({*shell.run_line_magic("who_ls", ""), *(running.names if running else ())})

    for magic in ("%accelerate", "%%accelerate"):
        shell.set_hook("complete_command", offer, str_key=magic)
    try:
        from IPython.core.completer import context_matcher
    except ImportError:  # before IPython 8.6
        return

    # Keeps Jedi, which reads the line as Python, from adding completions. Before all matchers of
    # IPython: the first one that asks for it silences the others.
    @context_matcher(identifier="notebook_accel", priority=1000)
    def of_magic(context: Any) -> Any:
        words = context.line_with_cursor.split(maxsplit=1)
        if words[:1] not in (["%accelerate"], ["%%accelerate"]):
            return {"completions": []}
        return {**shell.Completer.custom_completer_matcher(context), "do_not_suppress": set()}

    shell.Completer.custom_matchers.append(of_magic)


def _options(parser: ArgumentParser) -> list[str]:
    """Return the long options that Tab offers, without aliases with an underscore."""
    # Each option begins a line of the help, and its text comes after two spaces or below.
    lines = [line.strip() for line in parser.format_help().splitlines() if line.startswith("  -")]
    spelled = (word for line in lines for word in re.findall(r"--[\w-]+", line.partition("  ")[0]))
    return [text for text in spelled if "_" not in text]


# Each is a method of the magics.
_COMMANDS = (
    *("start", "stop", "restart", "status", "pull", "push"),
    *("logs", "stacks", "config", "doctor", "debug"),
)
_WITHOUT_ARGUMENTS = ("stop", "status", "doctor")
# One rank, or the first and the last of several; a digit too many in a range would take all memory.
_RANKS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register the magics ``%accelerate`` and ``%%accelerate``, and prepare for the first launch.

    ``%load_ext notebook_accel`` calls this function. To make the first launch fast, it also starts
    the helper process from which ranks are forked.

    Args:
        ipython: the notebook's IPython shell.

    Example:
        >>> %load_ext notebook_accel
    """
    ipython.register_magics(AccelerateMagics)
    complete_magic(ipython)
    prepare(ipython)


class CellSyntaxError(Exception):
    """A cell is not Python. No ``SyntaxError``: IPython would list the frames of the magic."""

    def __init__(self, error: SyntaxError, lines: list[str]) -> None:
        super().__init__(str(error))
        self._lines = lines

    def _render_traceback_(self) -> list[str]:
        return self._lines


def _setting(name: str, *short: str, **how: Any) -> Any:
    """Return the option of a setting, with the setting's own text."""
    about = settings_of(LaunchConfig)[name].about.replace("``", "")
    return argument(*short, f"--{name.replace('_', '-')}", f"--{name}", help=about, **how)


_NUM_PROCESSES = _setting("num_processes", "-n", type=int)
_MIXED_PRECISION = _setting("mixed_precision", metavar="PRECISION")
_CONFIG = argument("--config", metavar="FILE", help="YAML file with the session's settings")


@magics_class
class AccelerateMagics(Magics):
    """The magics ``%%accelerate`` and ``%accelerate``, as methods of a class for IPython."""

    shell: Any

    @magic_arguments("%accelerate")
    @argument("-h", "--help", action="store_true", help="show this text; the cell does not run")
    @_NUM_PROCESSES
    @argument("--ranks", metavar="RANKS", help="only these ranks run the cell: 0,2-3")
    @argument("--fresh", action="store_true", help="run it in new ranks, which end with it")
    @argument("--bg", action="store_true", help="run it in the background; gives a Run")
    @argument("--pull", metavar="NAMES", help="then copy these into the notebook: a,b")
    @argument(
        "--each-rank",
        "--each_rank",
        action="store_true",
        help="--pull gives a list with each rank's value, instead of rank 0's",
    )
    @argument("--push", metavar="NAMES", help="first copy these to the ranks: x,y")
    @argument("--no-push", "--no_push", action="store_true", help="copy none but those of --push")
    @argument("--write", metavar="FILE", help="first write it, and what it needs, as a script")
    @_MIXED_PRECISION
    @_CONFIG
    @line_cell_magic
    def accelerate(self, line: str, cell: str | None = None) -> Run | None:
        """Run the cell on several processes at once, which stay alive for the next cell.

        The processes are the ranks of a session, numbered from 0: the first cell starts them, and
        variables that a cell assigns are there in the next one. Each rank has `rank`, `world_size`,
        `device` and `accelerator`. Variables of the notebook that the cell uses are copied to the
        ranks, unless a cell of the session was the last to assign them. If the cell ends with an
        expression, its value is shown for each rank.

        As a line, %accelerate takes a command:

            %accelerate start [-n 2]     start the ranks, with the options -n, --mixed-precision
                                         and --config that stand below
            %accelerate restart [-n 4]   end them, and start new ones, which have no variables
            %accelerate stop             end them
            %accelerate status           state of each rank, and the names of their variables
            %accelerate pull a,b         copy variables of rank 0 into the notebook; --rank 1
                                         copies those of rank 1, --each-rank lists of all values
            %accelerate push x,y         copy variables of the notebook to all ranks
            %accelerate logs [RANK]      what the ranks, or one of them, have printed
            %accelerate stacks [RANK]    which line the ranks, or one of them, execute now
            %accelerate debug [RANK]     look into a cell or launch that failed, by pdb's commands
            %accelerate config [FILE]    the settings of a launch as a form
            %accelerate doctor           what on this machine stops or hurts a launch
        """
        if cell is None:
            with tracebacks.show_in_short():
                self._command(line)
            return None
        options = self.accelerate.parser.parse_args(_split(f"%%accelerate {line}")[1:])
        if options.help:
            print(self.accelerate.__doc__)  # noqa: T201
            return None
        only_lasting = ("ranks", "bg", "pull", "each_rank", "push", "no_push")
        others = [f"--{name.replace('_', '-')}" for name in only_lasting if getattr(options, name)]
        if options.fresh and others:
            raise UsageError(
                f"--fresh and {', '.join(others)}: new ranks run the whole cell with the names "
                "that it uses, and end with it; leave one of them out"
            )
        shell = self.shell
        # IPython 9 counts a cell before it runs it, older ones after.
        number = len(shell.user_ns["In"]) - 1
        # With the magic's own line: the page counts lines from there.
        text = f"%%accelerate {line}\n{cell}"
        source = CellSource(shell.compile.cache(text, number), f"Cell In[{number}]", text)
        with tracebacks.show_in_short():
            ranks = _parse_ranks(options.ranks)
            request = CellCall(
                text=cell,
                source=source,
                first_line=2,
                label=f"In[{number}]",
                ranks=ranks,
                pull=_parse_names(options.pull),
                pull_from=None if options.each_rank else min(ranks or [0]),
            )
            push = _parse_names(options.push)
            if options.each_rank and not request.pull:
                raise UsageError("--each-rank says what --pull gives: add --pull NAMES")
            code = shell.transform_cell(cell)
            _check_syntax(shell, code, source.filename)
            tracebacks.end_held_launch()
            if options.write and ranks is not None:
                raise UsageError(
                    "--write and --ranks: every process runs the whole of a script; leave one of "
                    "them out"
                )
            with self._ranks_for(options) as running:
                if options.write:
                    self._write(cell, number, options.write, running)
                run = running.run_cell(
                    request,
                    code=code,
                    number=number,
                    push=push,
                    pushes_used=not options.no_push,
                    in_background=options.bg,
                )
        return run if options.bg else None

    @contextmanager
    def _ranks_for(self, options: Any) -> Iterator[NotebookSession]:
        """Yield the kernel's session, started if needed; with ``--fresh`` one for the block."""
        if not options.fresh:
            yield session.session_for(self.shell, _given(options), options.config)
            return
        running = NotebookSession(self.shell, *resolve(_given(options), options.config))
        try:
            yield running
        except NotebookAccelError as error:
            error.hint = ""  # of a session that lasts
            raise
        finally:
            running.end()

    def _write(self, cell: str, number: int, path: str, running: NotebookSession) -> None:
        shell, target = self.shell, Path(path).expanduser()
        running.await_calls()
        script = script_of_cells(
            {**running.cells, number: cell},
            namespace=shell.user_ns,
            sources=[source.text for source in tracebacks.cell_sources(shell)],
            transform=shell.transform_cell,
            world_size=running.world_size,
            mixed_precision=running.config.mixed_precision,
            file=target.name,
        )
        target.write_text(script, encoding="utf-8")
        others = "; ".join(f"In[{one}], which {why}" for one, why in running.left_out.items())
        print(f"wrote {target}{others and f', without {others}'}")  # noqa: T201

    @magic_arguments("%everywhere")
    @argument("--list", action="store_true", help="show the cells that ranks run at their start")
    @argument("--clear", action="store_true", help="take them all back")
    @line_cell_magic
    def everywhere(self, line: str, cell: str | None = None) -> None:
        """Run the cell in the notebook now, and at the start of all ranks from now on.

        For what sets a library up and does not reach the ranks by itself. A cell that is run again
        takes the place of its earlier text. What it prints or displays shows once.
        """
        options = self.everywhere.parser.parse_args(_split(f"%everywhere {line}")[1:])
        if cell is not None:
            label = f"Cell In[{len(self.shell.user_ns['In']) - 1}]"
            run_everywhere(self.shell, line, cell, label)
            return
        if options.clear:
            EVERYWHERE.clear()
        texts = [f"# {source.label}\n{source.text}" for _, source in EVERYWHERE.values()]
        print("\n\n".join(texts) or "no %%everywhere cell")  # noqa: T201

    # ---- %accelerate COMMAND ---------------------------------------------------------------

    def _command(self, line: str) -> None:
        name, *arguments = _split(f"%accelerate {line}")[1:] or ["status"]
        if name in ("-h", "--help"):
            print(self.accelerate.__doc__)  # noqa: T201
            return
        if name not in _COMMANDS:
            known = ", ".join(_COMMANDS)
            raise UsageError(
                f"%accelerate {name}: expected one of {known}; %%accelerate runs a cell"
            )
        if name in _WITHOUT_ARGUMENTS and arguments:
            raise UsageError(f"%accelerate {line}: expected %accelerate {name}, with nothing more")
        getattr(self, f"_{name}")(arguments)

    @magic_arguments("%accelerate start")
    @_NUM_PROCESSES
    @_MIXED_PRECISION
    @_CONFIG
    def _start(self, arguments: Sequence[str]) -> None:
        options = self._start.parser.parse_args(arguments)
        session.start_session(self.shell, *resolve(_given(options), options.config))

    def _restart(self, arguments: Sequence[str]) -> None:
        running = session.current_session()
        options = self._start.parser.parse_args(arguments)
        config, notices = resolve(_given(options), options.config)
        if running is not None and options.config is None:
            changed = {name: value for name, value in _given(options).items() if value is not None}
            config, notices = replace(running.config, **changed), []
        session.restart_session(self.shell, config, notices)

    def _stop(self, arguments: Sequence[str]) -> None:
        ended = []
        if session.end_session():
            ended.append("the session has ended")
        if tracebacks.end_held_launch():
            ended.append("the ranks that waited for a debugger have ended")
        print("; ".join(ended) or "there is no session")  # noqa: T201

    def _status(self, arguments: Sequence[str]) -> None:
        running, held = session.current_session(), tracebacks.held_launch()
        none = "there is no session; the first %%accelerate cell starts one"
        print(none if running is None else running.describe())  # noqa: T201
        if held is not None:
            print(f"the ranks of {held[1].name}, which failed, wait for %accelerate debug")  # noqa: T201
        if line := imports_line():
            print(f"libraries: {line}")  # noqa: T201

    @magic_arguments("%accelerate pull")
    @argument("names", nargs="*", help="names of the session: a,b")
    @argument("--rank", type=int, default=0, help="whose values; rank 0's unless it is given")
    @argument("--each-rank", "--each_rank", action="store_true", help="a list of all ranks' values")
    def _pull(self, arguments: Sequence[str]) -> None:
        options = self._pull.parser.parse_args(arguments)
        names = _some_names(options.names)
        self._running().pull(names, rank=None if options.each_rank else options.rank)

    def _push(self, arguments: Sequence[str]) -> None:
        self._running().push(_some_names(arguments))

    def _logs(self, arguments: Sequence[str]) -> None:
        print(plain_text(self._running().logs(_parse_rank(arguments))), end="")  # noqa: T201

    def _stacks(self, arguments: Sequence[str]) -> None:
        print(self._running().stacks(_parse_rank(arguments)))  # noqa: T201

    def _debug(self, arguments: Sequence[str]) -> None:
        held, rank = tracebacks.held_launch(), _parse_rank(arguments)
        if held is None:
            running = self._running()
            tracebacks.debug(running.ask_debuggers, rank, lambda: running.failure)
        else:
            ranks, run = held
            tracebacks.debug(ranks.ask, rank, lambda: run.state.failure)
            tracebacks.end_held_launch()
            print("the ranks of the launch have ended")  # noqa: T201

    def _config(self, arguments: Sequence[str]) -> None:
        if len(arguments) > 1:
            raise UsageError(f"{' '.join(arguments)}: expected one YAML file, or nothing")
        display(config_picker(*arguments))

    def _doctor(self, arguments: Sequence[str]) -> None:
        lines = as_lines(examine(in_notebook=find_kernel() is not None))
        # What is printed JupyterLab breaks within words.
        html = lines_to_markup(lines, "margin:0;white-space:pre-wrap;word-break:normal")
        display({"text/plain": "\n".join(lines), "text/html": str(html)}, raw=True)

    def _running(self) -> NotebookSession:
        running = session.current_session()
        if running is None:
            raise UsageError(
                "there is no session; %accelerate start or an %%accelerate cell starts one"
            )
        return running


def _given(options: Any) -> dict[str, Any]:
    return {"num_processes": options.num_processes, "mixed_precision": options.mixed_precision}


def _check_syntax(shell: Any, text: str, filename: str) -> None:
    """Raise CellSyntaxError before a cell is sent to the ranks."""
    try:
        compile("\n" + text, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        lines = shell.SyntaxTB.structured_traceback(type(error), error, None)
        raise CellSyntaxError(error, lines) from error


def _split(line: str) -> list[str]:
    """Split and unquote as a shell does, unlike IPython; UsageError for an open quote."""
    try:
        return shlex.split(line)
    except ValueError as error:  # a quote without its end
        raise UsageError(f"{line}: {error}") from None


def _parse_names(text: str | None) -> tuple[str, ...]:
    """Return names of ``a,b`` or ``a b`` in NFKC, as Python's; UsageError for no identifier."""
    names = tuple(unicodedata.normalize("NFKC", text or "").replace(",", " ").split())
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is no name of a variable; expected some such as model,loss")
    return names


def _some_names(arguments: Sequence[str]) -> tuple[str, ...]:
    """As ``_parse_names``, of all arguments; UsageError for none."""
    names = _parse_names(",".join(arguments))
    if not names:
        raise UsageError("no variable is named; expected some such as model,loss")
    return names


def _parse_ranks(text: str | None) -> frozenset[int] | None:
    """Return the ranks in ``0,2-3``; None is all. UsageError if the text names none."""
    if text is None:
        return None
    ranks: set[int] = set()
    for part in text.replace(" ", "").split(","):
        found = _RANKS.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise UsageError(f"--ranks {text}: expected ranks such as 0,2-3, below 100,000")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def _parse_rank(arguments: Sequence[str]) -> int | None:
    if not arguments:
        return None
    found = _RANKS.fullmatch(arguments[0])
    if len(arguments) > 1 or found is None or found[2]:
        raise UsageError(f"{' '.join(arguments)}: expected the number of one rank, or nothing")
    return int(found[1])
