"""The local engine keeps the contract."""

from __future__ import annotations

from tests.engines.contract import EngineContract


class TestLocalEngine(EngineContract):
    engine = "local"
