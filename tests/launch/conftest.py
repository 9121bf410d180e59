"""For the tests of what crosses between a notebook and its ranks."""

import pytest

from tests.descriptors import open_descriptors
from tests.launch.payload.notebooks import Notebook


@pytest.fixture
def notebook(monkeypatch):
    return Notebook(monkeypatch)


@pytest.fixture
def leaves_no_descriptor():
    before = open_descriptors()
    yield
    assert not open_descriptors() - before
