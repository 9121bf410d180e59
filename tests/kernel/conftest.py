"""A notebook for a test."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.notebooks import Notebook, open_notebook


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path / "runs"))
    # A short one: sockets get their paths there.
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        with open_notebook() as notebook:
            yield notebook
