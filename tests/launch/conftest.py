"""A notebook and its ranks, for the tests of what crosses between them."""

from collections.abc import Iterator

import pytest

from tests.launch.payload.clean_ranks import Notebook, Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> Notebook:
    return Notebook(monkeypatch, ranks)
