"""The style sheets of what is drawn by widgets."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from notebook_accel.notebook.markup import Markup

__all__ = ["style_element"]


@lru_cache
def style_element(name: str = "panel") -> Markup:
    """The style sheet of that name as a ``<style>`` element, for a widget beside what it styles."""
    return Markup(f"<style>{Path(__file__).with_name(f'{name}.css').read_text()}</style>")
