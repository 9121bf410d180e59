"""Whether a live panel is legible in windows of several widths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.notebook.lab import Notebook

__all__ = ["check_layout", "check_summary_layout", "check_table_layout", "check_tags"]

# What is cut, out of the panel or over something else, in a window of that width. Names may be cut.
_FAULTS = """(width) => {
  const notebook = document.querySelector('.jp-NotebookPanel');
  if (notebook.getBoundingClientRect().right > width + 1) return ['not laid out yet'];
  const panel = document.querySelector('.na-panel');
  const faults = panel.scrollWidth > panel.clientWidth ? ['the panel is too wide'] : [];
  const bar = panel.querySelector('.na-log .na-log-bar');
  if (bar.clientHeight > 40) faults.push('the bar above the log has two lines');
  const buttons = panel.querySelector('.na-buttons').clientHeight;
  if (buttons > 50 && panel.clientWidth > 460) faults.push('the buttons have two lines');
  const shown = [];
  const names = '.na-c-label, .na-name';
  for (const part of panel.querySelectorAll(`.na-title span, .na-title b, th, td, button, select,
      .na-log-bar input, .na-log-title, .na-chart-head > *, progress`)) {
    let box = part.getBoundingClientRect();
    // Where it has no room, it is wholly out of sight.
    const line = part.parentElement.getBoundingClientRect();
    if (part.matches('.na-best') && box.top >= line.bottom) continue;
    if (!box.width || part.matches('td:has(progress), :is(span, b, th, td):empty')) continue;
    const text = part.textContent.trim() || part.placeholder || '';
    const name = `${part.className || part.tagName} ${text.slice(0, 20)}`;
    if (part.matches('progress') && box.width < 40) faults.push(`${name}: ${box.width} px`);
    const isCut = part.scrollWidth > part.clientWidth + 1 && !part.matches(names);
    if (isCut) faults.push(`${name}: cut`);
    for (let above = part.parentElement; panel.contains(above); above = above.parentElement) {
      const room = above.getBoundingClientRect();
      if (getComputedStyle(above).overflowX === 'visible') continue;
      if (box.left < room.left - 1 || box.right > room.right + 1
          || box.top < room.top - 1 || box.bottom > room.bottom + 1) {
        faults.push(`${name}: out of ${above.className}`);
      }
    }
    if (part.matches('span, b, th, td')) {
      const range = document.createRange();
      range.selectNodeContents(part);
      const words = range.getBoundingClientRect();
      const left = Math.max(words.left, box.left), right = Math.min(words.right, box.right);
      box = new DOMRect(left, words.top, right - left, words.height);
    }
    for (const [other, before] of shown) {
      if (Math.min(box.right, before.right) - Math.max(box.left, before.left) > 1
          && Math.min(box.bottom, before.bottom) - Math.max(box.top, before.top) > 1) {
        faults.push(`${name} over ${other}`);
      }
    }
    shown.push([name, box]);
  }
  return faults;
}"""


# On a page that is narrower still, how each rank stands.
_STATES_FIT = """() => {
  const states = [...document.querySelectorAll('td.na-c-state')];
  return document.querySelector('.na-panel').offsetWidth < 310 && states.every((state) =>
    state.offsetWidth && state.scrollWidth <= state.clientWidth);
}"""


def check_layout(notebook: Notebook) -> None:
    before = notebook.page.viewport_size
    notebook.hide_sidebar()
    for width in (1200, 600, 400):
        notebook.page.set_viewport_size({"width": width, "height": 1000})
        deadline = time.monotonic() + 10
        while (faults := notebook.page.evaluate(_FAULTS, width)) and time.monotonic() < deadline:
            notebook.page.wait_for_timeout(100)
        assert not faults, f"{width} px: {faults}"
    notebook.page.set_viewport_size({"width": 340, "height": 1000})
    notebook.page.wait_for_function(_STATES_FIT, timeout=10_000)
    assert before is not None
    notebook.page.set_viewport_size(before)


# Wherever the log is scrolled to, one of its first lines says whose it is.
_TAGS_STAY = """() => {
  const log = document.querySelector(".na-scroll"), top = log.getBoundingClientRect().top;
  const isHigh = ({y}) => top - 1 <= y && y < top + 56;
  const tags = [...log.querySelectorAll(".na-tag")];
  const found = [100, 250, 400, 550].map((distance) => {
    log.scrollTop = -distance;
    return tags.some((tag) => isHigh(tag.getBoundingClientRect()));
  });
  log.scrollTop = 0;
  return found;
}"""


def check_tags(notebook: Notebook) -> None:
    """Of the first lines of the log that are in sight one says which rank has printed them."""
    notebook.page.wait_for_function(f"() => ({_TAGS_STAY})().every(Boolean)", timeout=10_000)


# Whether the table of the doctor is legible in a narrow window: all is in sight, nothing cut, and
# each answer stands right below what it is about.
_FITS = """() => {
  const table = [...document.querySelectorAll('.jp-OutputArea-output table')].at(-1);
  const area = table.closest('.jp-Cell-outputArea').getBoundingClientRect();
  const right = Math.min(area.right, table.parentElement.getBoundingClientRect().right);
  return area.width < 400 && [...table.querySelectorAll('th, td')].every((cell) =>
    cell.scrollWidth <= cell.clientWidth && cell.getBoundingClientRect().right <= right + 1)
    && [...table.rows].every(({cells: [, text]}) => {
      const [about, answer] = [...text.children].map((part) => part.getBoundingClientRect());
      return about.left === answer.left && about.bottom <= answer.top + 1;
    });
}"""
# Whether each of its cells stands below the head of its column, and what does not fit is reached by
# scrolling: nothing is out of the page, and how each rank stands is in sight from the start.
_HAS_COLUMNS = """() => {
  const table = [...document.querySelectorAll('.jp-OutputArea-output table')].at(-1);
  const [heads, ...rows] = [...table.rows].map((row) =>
    [...row.cells].map((cell) => cell.getBoundingClientRect()));
  const box = table.parentElement, room = box.getBoundingClientRect();
  const area = table.closest('.jp-Cell-outputArea').getBoundingClientRect();
  const fits = table.offsetWidth <= box.clientWidth;
  return room.right <= area.right && area.right <= innerWidth && heads.length > 3
    && (fits || getComputedStyle(box).overflowX === 'auto') && (fits || area.width < 400)
    && heads[2].left + 90 < room.right && rows.length && rows.every((row) =>
      row.every((cell, index) => cell.top === row[0].top && cell.left === heads[index].left));
}"""


def check_table_layout(notebook: Notebook) -> None:
    _check_in_windows(notebook, (400,), _FITS)


def check_summary_layout(notebook: Notebook) -> None:
    """The table of the newest summary has columns in each window, and scrolls in a narrow one."""
    _check_in_windows(notebook, (400, 600), _HAS_COLUMNS)


def _check_in_windows(notebook: Notebook, widths: Sequence[int], condition: str) -> None:
    before = notebook.page.viewport_size
    notebook.hide_sidebar()
    for width in widths:
        notebook.page.set_viewport_size({"width": width, "height": 1000})
        notebook.page.wait_for_function(condition, timeout=10_000)
    assert before is not None
    notebook.page.set_viewport_size(before)
