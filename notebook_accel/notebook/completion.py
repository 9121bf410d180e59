"""What Tab offers in a line of the magic: commands, options, their values, and names.

IPython asks a completer by the first word of the line, and takes of its answer what begins with
the word at the cursor. From IPython 8.6 on a matcher leaves out what others offer beside that.
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
    values: Mapping[str, Callable[[], Iterable[str]]],
) -> None:
    """Have Tab complete lines of ``%accelerate`` and ``%%accelerate``.

    Args:
        shell: of the notebook.
        cell_options: the options of ``%%accelerate``.
        commands: the commands of ``%accelerate``, with the options of each.
        values: give what may follow an option (by the name of its attribute), or a command.
    """

    def after(words: list[str], symbol: str, parser: ArgumentParser | None) -> Iterable[str]:
        if symbol.startswith("-"):
            return () if parser is None else _options(parser)
        return sorted(values.get(words[-1].lstrip("-").replace("-", "_"), tuple)())

    def of_cell(_shell: Any, event: Any) -> list[str]:
        return [*after(_words_before(event), event.symbol, cell_options)]

    def of_line(_shell: Any, event: Any) -> list[str]:
        words = _words_before(event)
        if len(words) == 1:
            return [*commands, "--help"]
        is_of_command = words[1] in values and not words[-1].startswith("-")
        return [
            *after(words[1:2] if is_of_command else words, event.symbol, commands.get(words[1]))
        ]

    untyped: Any = shell
    untyped.set_hook("complete_command", of_cell, str_key="%%accelerate")
    untyped.set_hook("complete_command", of_line, str_key="%accelerate")
    _silence_jedi(untyped.Completer)


def _silence_jedi(completer: Any) -> None:
    """Have a line of the magic get our answers alone.

    IPython adds Jedi's to those of a completer that it asks by the first word: a line of a magic
    is no Python, and ``--`` would give ``--abs``.
    """
    try:
        from IPython.core.completer import context_matcher
    except ImportError:  # before IPython 8.6
        return

    # Before all matchers of IPython: the first one that asks for it silences the others.
    @context_matcher(identifier="notebook_accel", priority=1000)  # type: ignore[untyped-decorator]
    def of_magic(context: Any) -> Any:
        words = context.line_with_cursor.split(maxsplit=1)
        if words[:1] not in (["%accelerate"], ["%%accelerate"]):
            return {"completions": []}
        return {**completer.custom_completer_matcher(context), "do_not_suppress": set()}

    completer.custom_matchers.append(of_magic)


def _words_before(event: Any) -> list[str]:
    """The words of the line before the one at the cursor; the magic is the first.

    Of a list of names, ``a,b``, those before the cursor are left out.
    """
    text: str = event.text_until_cursor.removesuffix(event.symbol).replace("=", " ")
    words = text.split() or [event.text_until_cursor]
    while words[-1].endswith(","):
        words.pop()
    return words


def _options(parser: ArgumentParser) -> list[str]:
    """The long options, each in the spelling that a person types."""
    return [
        text
        for action in parser._actions
        for text in action.option_strings
        if text.startswith("--") and "_" not in text
    ]
