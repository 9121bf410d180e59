"""A clock that a test sets; and what an open page showed, in the report of a test that failed."""

from types import SimpleNamespace

import pytest

from notebook_accel.notebook import live_panel, rank_displays
from tests.notebook.lab import describe_pages


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo is not None and call.when == "call" and "browser" in item.keywords:
        for title, text in describe_pages():
            report.sections.append((title, text))
    return report


@pytest.fixture
def clock(monkeypatch):
    """Says to panels and outputs what the time is: ``clock.now``, in seconds."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    for module in (live_panel, rank_displays):
        monkeypatch.setattr(module, "time", clock)
    return clock
