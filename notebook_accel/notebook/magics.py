"""``%%accelerate``: a cell that runs on every rank. Loaded by ``%load_ext notebook_accel``."""

# IPython's decorators carry no types.
# mypy: disable-error-code="no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from notebook_accel.launch.payload import CellSource
from notebook_accel.launch.template.handle import warm
from notebook_accel.launch.view import wording
from notebook_accel.notebook.cell_function import cell_function
from notebook_accel.notebook.launcher import run_cell
from notebook_accel.notebook.tracebacks import show_in_short

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["AccelerateMagics", "CellSyntaxError", "by_rank", "load_ipython_extension"]


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register the magics and start the template, so that the first launch finds it ready."""
    ipython.register_magics(AccelerateMagics)
    warm()


class CellSyntaxError(Exception):
    """The text of a cell is not Python. Its ``__cause__`` is the ``SyntaxError``.

    It is no ``SyntaxError`` itself: of one that a magic raises IPython also lists the frames of
    the magic. IPython asks an exception for ``_render_traceback_`` and shows those lines alone.
    """

    def __init__(self, error: SyntaxError, lines: list[str]) -> None:
        super().__init__(str(error))
        self._lines = lines

    def _render_traceback_(self) -> list[str]:
        return self._lines


@contextmanager
def _shown_as_syntax_error(shell: InteractiveShell) -> Iterator[None]:
    """Have IPython show a ``SyntaxError`` from here as it shows one of a cell without a magic."""
    try:
        yield
    except SyntaxError as error:
        lines = shell.SyntaxTB.structured_traceback(type(error), error, None)
        raise CellSyntaxError(error, lines) from error


@magics_class
class AccelerateMagics(Magics):
    """The magics of this package."""

    @magic_arguments("%accelerate")
    @argument("-h", "--help", action="store_true", help="show this text; the cell does not run")
    @argument("-n", "--num-processes", "--num_processes", type=int, help="number of ranks")
    @argument(
        "--mixed-precision",
        "--mixed_precision",
        metavar="PRECISION",
        help='"no", "bf16" or "fp16", for every Accelerator that does not say its own',
    )
    @cell_magic
    def accelerate(self, line: str, cell: str) -> None:
        """Run the cell on every rank of a new run.

        The names of the notebook that it uses travel along by value; ``rank``, ``world_size``,
        ``device`` and ``accelerator`` are there. The value of a last expression is shown for
        each rank.
        """
        options = parse_argstring(self.accelerate, line)
        if options.help:
            print(self.accelerate.__doc__)  # noqa: T201
            return
        shell: Any = self.shell
        # IPython 9 counts a cell before it runs it, older ones after.
        number = len(shell.user_ns["In"]) - 1
        # With the magic's own line: the page counts lines from there.
        text = f"%%accelerate {line}\n{cell}"
        source = CellSource(shell.compile.cache(text, number), f"Cell In[{number}]", text)
        with show_in_short(), _shown_as_syntax_error(shell):
            function = cell_function(
                cell,
                namespace=shell.user_ns,
                filename=source.filename,
                name=f"In[{number}]",
                first_line=2,
            )
        settings = {
            "num_processes": options.num_processes,
            "mixed_precision": options.mixed_precision,
        }
        run = run_cell(function, settings, source)
        print(by_rank(run.results), end="")  # noqa: T201


def by_rank(texts: Sequence[str | None]) -> str:
    """What each rank shows, with a label, equal texts once: ``ranks 0-1: 3``."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(texts):
        if text is not None:
            alike[text].append(rank)
    lines: list[str] = []
    for text, ranks in alike.items():
        # A text of several lines starts below its label, so that its columns stay aligned.
        separator = "\n" if "\n" in text else " "
        lines.append(f"{wording.rank_list(ranks)}:{separator}{text}\n")
    return "".join(lines)
