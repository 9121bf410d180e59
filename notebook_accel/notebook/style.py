"""The style sheet of the live panel."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from notebook_accel.notebook.markup import Markup

__all__ = ["style_element"]


@lru_cache(maxsize=1)
def style_element() -> Markup:
    """``panel.css`` as a ``<style>`` element, for a widget beside the panel."""
    return Markup(f"<style>{Path(__file__).with_name('panel.css').read_text()}</style>")
