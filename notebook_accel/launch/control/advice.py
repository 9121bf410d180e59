"""What a training function seems to have forgotten, in lines that the end of a run can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.payload import PackedCall

__all__ = ["closing_advice"]


def closing_advice(last: RunState, packed: PackedCall) -> list[str]:
    """Lines for the person.

    Args:
        last: the state of the run at its end.
        packed: what was called.
    """
    lines = _lost_models(last, packed)
    has_group = any(rank.made_group for rank in last.ranks)
    has_succeeded = all(rank.returned for rank in last.ranks)
    # A function without torch trains nothing: copies that run on their own are what it wants.
    if packed.uses_torch and last.world_size > 1 and has_succeeded and not has_group:
        alone = (
            f"no rank made a process group: {last.world_size} copies of {last.name} ran on their "
            "own (make an Accelerator in it, or call torch.distributed.init_process_group)"
        )
        lines.append(alone)
    return lines


def _lost_models(last: RunState, packed: PackedCall) -> list[str]:
    """A model that the function trained stays in the ranks, unless it is returned."""
    has_nothing = all(rank.returned and rank.returned_none for rank in last.ranks)
    if not packed.models or not has_nothing:
        return []
    names = ", ".join(f"`{name}`" for name in packed.models)
    lost = (
        f"{last.name} used {names} of the notebook and returned None: the notebook's own stays as "
        "it was; return what you want to keep"
    )
    return [lost]
