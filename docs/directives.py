"""What pages take from the code as the site is built: command help, settings and pictures.

{command-help} launch      what `notebook-accel launch --help` prints
{settings}                 the table of LaunchConfig
{picture} ddp              which part of a training each rank holds (pictures.py)
{picture} machines.svg     a drawing, which takes the colours of the page
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from pictures import STRATEGIES, draw
from sphinx.util.docutils import SphinxDirective

from notebook_accel import LaunchConfig
from notebook_accel.config import settings_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx

__all__ = ["setup"]

DRAWINGS = Path(__file__).parent / "drawings"


class CommandHelp(SphinxDirective):
    """The help of a command, as a terminal prints it."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        command = [sys.executable, "-m", "notebook_accel", *self.arguments, "--help"]
        done = subprocess.run(
            command, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=True
        )
        block = nodes.literal_block(done.stdout, done.stdout, language="text")
        return [block]


class Settings(SphinxDirective):
    """The settings of a launch, as a list of definitions."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(_rows()))


def _rows() -> Iterator[str]:
    for name, row in settings_of(LaunchConfig).items():
        variables = ", ".join(f"`{variable}`" for variable in row.variables)
        in_yaml = f" In the YAML of `accelerate config`: `{row.yaml}`." if row.yaml else ""
        default = row.unset or f"`{row.default!r}`"
        yield f"`{name}`"
        yield f": {row.about}. Default: {default}. Environment: {variables}.{in_yaml}\n".replace(
            "``", "`"
        )


class Picture(SphinxDirective):
    """A picture within the page, so that it has the colours of the theme."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name in STRATEGIES:
            svg = draw(STRATEGIES[name])
        else:
            svg = (DRAWINGS / name).read_text(encoding="utf-8")
        return [nodes.raw("", f'<div class="picture">{svg}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("command-help", CommandHelp)
    app.add_directive("settings", Settings)
    app.add_directive("picture", Picture)
    return {"parallel_read_safe": True}
