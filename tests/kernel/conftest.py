"""A notebook for a test."""

import tempfile

import pytest

from tests.kernel.notebooks import open_notebook


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path / "runs"))
    # A short one: sockets get their paths there.
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        with open_notebook() as notebook:
            yield notebook
