"""The only place where private names of transformers are used."""

from __future__ import annotations

import os
from typing import Any


def restore_arguments(arguments: Any, state: dict[str, Any]) -> None:
    """Set the state of ``TrainingArguments`` from another process, with the device of this one.

    They keep the device that they found when they were made, and the number of GPUs. To let them
    look again would reset the state of accelerate below a ``Trainer``.
    """
    vars(arguments).update(state)
    is_on_cpu = os.environ.get("ACCELERATE_USE_CPU") == "true"
    for name, found in state.items():
        # The cached property has another name in older releases.
        if name.endswith("_setup_devices") and found.type != "cpu":
            device = type(found)
            rank = int(os.environ.get("LOCAL_RANK", "0"))
            vars(arguments)[name] = device("cpu") if is_on_cpu else device(found.type, rank)
        elif name == "_n_gpu":
            vars(arguments)[name] = 0 if is_on_cpu else min(found, 1)
