"""The local engine keeps the contract."""

from tests.engines.contract import EngineContract


class TestLocalEngine(EngineContract):
    engine = "local"
