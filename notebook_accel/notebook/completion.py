"""What Tab offers in a line of the magic: commands, options, and names of the session.

IPython asks a completer by the first word of the line, and takes of its answer what begins with
the word at the cursor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Iterable, Mapping

    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["complete_magic"]


def complete_magic(
    shell: InteractiveShell,
    cell_options: ArgumentParser,
    commands: Mapping[str, ArgumentParser | None],
    names: Callable[[], Iterable[str]],
) -> None:
    """Have Tab complete lines of ``%accelerate`` and ``%%accelerate``.

    Args:
        shell: of the notebook.
        cell_options: the options of ``%%accelerate``.
        commands: the commands of ``%accelerate``, with the options of each.
        names: gives the names of the session.
    """

    def of_cell(_shell: Any, event: Any) -> list[str]:
        if _words_before(event)[-1] == "--pull":
            return sorted(names())
        return _options(cell_options) if event.symbol.startswith("-") else []

    def of_line(_shell: Any, event: Any) -> list[str]:
        before = _words_before(event)[1:]
        if not before:
            return [*commands, "--help"]
        parser = commands.get(before[0])
        if event.symbol.startswith("-"):
            return [] if parser is None else _options(parser)
        return sorted(names()) if before[0] == "pull" else []

    untyped: Any = shell
    untyped.set_hook("complete_command", of_cell, str_key="%%accelerate")
    untyped.set_hook("complete_command", of_line, str_key="%accelerate")


def _words_before(event: Any) -> list[str]:
    """The words of the line before the one at the cursor; the magic is the first."""
    text: str = event.text_until_cursor
    return text.removesuffix(event.symbol).split() or [text]


def _options(parser: ArgumentParser) -> list[str]:
    """The long options, each in the spelling that a person types."""
    return [
        text
        for action in parser._actions
        for text in action.option_strings
        if text.startswith("--") and "_" not in text
    ]
