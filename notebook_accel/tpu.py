"""TPUs of this machine, and the library that is installed for them, without importing either.

torch_xla takes seconds to import and initialises the runtime with the first question, and whoever
has a chip keeps others from it: the kernel must have none.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEVICE_VARIABLES", "LEFTOVERS", "Library", "count_chips", "count_devices", "library"]

_PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# Devices of a chip, by its number on the PCI bus: v2 and v3, v4, v5e, v6e, v7. The same table as in
# torch_xla/_internal/tpu.py (2.9.0).
_DEVICES_OF_CHIP = {"0x0027": 2, "0x005e": 1, "0x0063": 1, "0x006f": 1, "0x0076": 2}
# What a platform, or an earlier launch, leaves behind about processes that are none of this launch.
LEFTOVERS = (
    "TPU_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_PORT",
    "TPU_VISIBLE_CHIPS",
    "CLOUD_TPU_TASK_ID",
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
)
DEVICE_VARIABLES = "PJRT_DEVICE and CPU_NUM_DEVICES"


class Library(NamedTuple):
    """What drives TPUs here.

    Attributes:
        name: "torch_xla" or "torch_tpu".
        version: of it.
        problem: why it cannot be used; "" where it can.
    """

    name: str
    version: str
    problem: str = ""


def library() -> Library | None:
    """The library for TPUs that is installed; None where there is none."""
    own = _version("torch_tpu")
    if own is not None:
        return Library("torch_tpu", own)
    xla = _version("torch_xla")
    if xla is None:
        return None
    torch = _version("torch") or "none"
    if torch.split(".")[:2] == xla.split(".")[:2]:
        return Library("torch_xla", xla)
    fitting = ".".join(xla.split(".")[:2])
    return Library(
        "torch_xla",
        xla,
        f"torch_xla {xla} is built for torch {fitting}, and torch {torch} is installed, with which "
        f"it cannot be imported: pip install 'torch=={fitting}.*' 'torch_xla=={fitting}.*', and "
        "restart the kernel",
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def count_chips() -> dict[str, int]:
    """How many TPU chips of each kind are on the PCI bus, by their number there."""
    chips: dict[str, int] = {}
    for vendor in _PCI.glob("*/vendor"):
        if vendor.read_text().strip() == _GOOGLE:
            kind = vendor.with_name("device").read_text().strip()
            if kind in _DEVICES_OF_CHIP:
                chips[kind] = chips.get(kind, 0) + 1
    return chips


def count_devices(environment: Mapping[str, str]) -> tuple[str, int]:
    """The platform of torch_xla ("TPU", "CPU", ...; "" for none), and how many devices it has.

    Args:
        environment: of the launch: PJRT_DEVICE names a platform.
    """
    chips = count_chips()
    platform = environment.get("PJRT_DEVICE") or ("TPU" if chips else "")
    if platform == "CPU":
        return platform, int(environment.get("CPU_NUM_DEVICES") or 1)
    if platform == "TPU":
        return platform, sum(_DEVICES_OF_CHIP[kind] * number for kind, number in chips.items())
    return platform, 0


def is_torch_xlas(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this machine's accelerator is a TPU that torch_xla can use."""
    found = library()
    platform, count = count_devices(os.environ if environment is None else environment)
    return bool(
        found and found.name == "torch_xla" and not found.problem and platform == "TPU" and count
    )
