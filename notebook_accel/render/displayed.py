"""What ranks display as one piece of HTML, for the panel, the summary and ``run.show()``.

Ranks mostly display the same. So only the displays of the first rank that runs the call are shown.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from markupsafe import Markup

from notebook_accel.launch import run_list
from notebook_accel.launch.control.run_state import RankState, RunState
from notebook_accel.launch.text import wording
from notebook_accel.render.markup import element, join, message_bytes

# Of one piece of HTML: at a run's end it is sent twice at once, and a Jupyter server drops what is
# more than 3 MB in 3 seconds.
_MAX_BYTES = 700_000
LABEL_STYLE = "opacity:.65;font-size:13px;padding:0 7px"


def render_displays(state: RunState) -> Markup:
    """For a run whose cell has ended, to whose outputs nothing can be added; "" for no displays."""
    rank = first_asked(state)
    shown: list[Markup] = []
    room = _MAX_BYTES
    for display in reversed(rank.displays):
        html = element("div", _as_html(display.data), style="margin:4px 0;overflow-x:auto")
        room -= message_bytes(html)
        if room < 0:
            break
        shown.insert(0, html)
    lines = [f"rank {rank.rank}"] if state.world_size > 1 and rank.displays else []
    num_hidden = rank.num_displays - rank.num_cleared - len(shown)
    if num_hidden:
        lines.append(f"{num_hidden:,} more not shown here")
    if len(shown) < len(rank.displays):
        show = f"{run_list.expression(state.run)}.show({rank.rank})"
        lines[-1] += f": {show} shows the newest {len(rank.displays)}"
    return join([*(element("div", line, style=LABEL_STYLE) for line in lines), *shown])


def other_displays(state: RunState) -> str:
    """Return a line that names the ranks that displayed other things than shown; "" for none."""
    shown = _contents(first_asked(state))
    others = [rank.rank for rank in state.ranks if _contents(rank) not in ([], shown)]
    if not others:
        return ""
    show = f"{run_list.expression(state.run)}.show({others[0]})"
    return f"what {wording.rank_list(others)} displayed: {show}"


def first_asked(state: RunState) -> RankState:
    """Return the rank whose displays are shown; a call may be for some ranks only (``--ranks``)."""
    return next((rank for rank in state.ranks if rank.is_asked), state.ranks[0])


def _contents(rank: RankState) -> list[dict[str, str]]:
    return [display.data for display in rank.displays]


def _as_html(data: Mapping[str, str]) -> Markup:
    """Return its own HTML, or else its image (base64 but for SVG), or else its text."""
    if "text/html" in data:
        # The person's own, as an output of an ordinary cell would hold it.
        return Markup(data["text/html"])
    for mime, content in data.items():
        if mime.startswith("image/"):
            # SVG comes as text, other images in base64.
            encoded = content
            if mime == "image/svg+xml":
                encoded = base64.b64encode(content.encode(errors="replace")).decode()
            alt = data.get("text/plain", "")[:200]
            source = f"data:{mime};base64,{encoded}"
            return element("img", alt=alt, src=source, style="max-width:100%")
    written = (data[mime] for mime in ("text/markdown", "text/latex", "text/plain") if mime in data)
    return element("pre", next(written, ""))
