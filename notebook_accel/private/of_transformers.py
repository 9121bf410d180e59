"""The only place where private names of transformers are used."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any


def restore_arguments(arguments: Any, state: dict[str, Any]) -> None:
    """Set the state of ``TrainingArguments`` from another process, with the device of this one.

    They keep the device that they found when they were made, and the number of GPUs. To let them
    look again would reset the state of accelerate below a ``Trainer``.
    """
    import torch

    vars(arguments).update(state)
    on_cpu = state.get("use_cpu") or os.environ.get("ACCELERATE_USE_CPU") == "true"
    kind = None if on_cpu else torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        device = torch.device("cpu")
    else:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device(kind.type, rank % torch.accelerator.device_count())
    for name, found in state.items():
        # The cached property has another name in older releases.
        if name.endswith("_setup_devices") and found.type != "xla":
            vars(arguments)[name] = device
        elif name == "_n_gpu":
            vars(arguments)[name] = 0 if kind is None else 1
    later = state.get("distributed_state")
    if later is not None:
        # As they would have made it here.
        more = {"cpu": True} if on_cpu else {"timeout": timedelta(seconds=state["ddp_timeout"])}
        vars(later)["settings"] = {"backend": state["ddp_backend"], **more}
