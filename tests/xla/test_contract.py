"""What every engine must do, by ranks that ``xmp.spawn`` starts on torch_xla's CPU device.

There the ranks of a launch are threads of one process, as on TPUs whose chips have two cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.launch.launcher import launch
from notebook_accel.launch.view import View
from tests.engines.contract import EngineContract

if TYPE_CHECKING:
    from notebook_accel.launch.run import Run


class TestXla(EngineContract):
    engine = "xla"

    @pytest.fixture(autouse=True)
    def _devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NOTEBOOK_ACCEL_XLA_MODULES", "tests.xla.stand_in")
        monkeypatch.setenv("CPU_NUM_DEVICES", "2")
        self._set = monkeypatch.setenv

    def launch(self, function: Any, *args: Any, n: int = 2, **options: Any) -> Run:
        self._set("CPU_NUM_DEVICES", str(n))
        config = LaunchConfig(engine=self.engine, grace=options.pop("grace", 10.0))
        return launch(function, args, config=config, **{"view": View(), **options})
