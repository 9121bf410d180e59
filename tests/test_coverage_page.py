"""docs/accelerate_names.md says what is so of the installed Accelerate."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from tests.public import PACKAGE

if TYPE_CHECKING:
    from types import ModuleType

ROOT = PACKAGE.parent


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_coverage", ROOT / "docs" / "coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh(coverage: ModuleType) -> None:
    written = coverage.PAGE.read_text()
    if f"accelerate {version('accelerate')}:" not in written:
        pytest.skip("another release of accelerate is installed than the page is about")
    assert written == coverage.page(), "run: .venv/bin/python docs/coverage.py"


def test_what_only_refuses_is_told_from_what_is_here(coverage: ModuleType) -> None:
    from notebook_accel.utils import MegatronLMPlugin

    from notebook_accel import Accelerator

    found = [coverage.is_here(value) for value in (Accelerator, MegatronLMPlugin, None)]
    assert found == ["yes", "refused", "no"]


def test_arguments_that_ours_lacks_are_found(coverage: ModuleType) -> None:
    def theirs(a: int, b: int, *args: int, c: int = 0) -> None: ...

    def ours(a: int) -> None: ...

    def anything(**kwargs: int) -> None: ...

    assert coverage.missing_arguments(theirs, ours) == ["b", "c"]
    assert coverage.missing_arguments(theirs, anything) == []
    assert coverage.missing_arguments(theirs, theirs) == []
