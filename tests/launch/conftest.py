"""A notebook, for the tests of what crosses between it and its ranks."""

import pytest

from tests.launch.payload.notebooks import Notebook


@pytest.fixture
def notebook(monkeypatch):
    return Notebook(monkeypatch)
