"""The widgets of one panel: how many a page has to load, and that all are closed."""

from __future__ import annotations

import ipywidgets

from notebook_accel.notebook.live_panel import PanelWidgets
from tests.notebook.widgets import live_widgets


def test_widgets_share_one_layout_and_a_style_a_kind_and_are_closed_with_them() -> None:
    before = set(live_widgets())
    widgets = PanelWidgets()
    texts = [widgets.make(ipywidgets.HTML, f"text {number}") for number in range(5)]
    buttons = [widgets.make(ipywidgets.Button, description="Stop") for _ in range(5)]
    boxes = [widgets.make(ipywidgets.VBox, [text]) for text in texts]
    assert len({each.layout.model_id for each in (*texts, *buttons, *boxes)}) == 1
    assert len({each.style.model_id for each in texts}) == 1
    assert len({each.style.model_id for each in buttons}) == 1
    hidden = widgets.make(ipywidgets.HTML, layout=ipywidgets.Layout(display="none"))
    assert texts[0].layout.display is None

    # One that is closed before leaves the others as they are.
    boxes[0].close()
    assert boxes[1].layout.comm is not None
    assert len(set(live_widgets()) - before) == 14 + 1 + 2 + 2
    widgets.close()
    assert set(live_widgets()) == before
    assert hidden.layout.comm is None
