"""Skips all of this folder, visibly, where torch_xla is not installed, and says which device."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("torch_xla") is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="torch_xla is missing: make test-tpu"))


@pytest.fixture(autouse=True)
def _on_the_cpu_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    path = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    monkeypatch.setenv("NOTEBOOK_ACCEL_XLA_MODULES", "tests.xla.stand_in")
    return 2
