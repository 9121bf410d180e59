"""Advice at the end of a run whose function seems to have forgotten something, and raised nothing.

What an error advises is in error_hints.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.payload import PackedCall

__all__ = ["closing_advice"]


def closing_advice(last: RunState, packed: PackedCall) -> list[str]:
    """What the function seems to have forgotten, one line for each; often none.

    Args:
        last: the state of the run at its end.
        packed: what was called.
    """
    lines = _lost_models(last, packed)
    has_group = any(rank.made_group for rank in last.ranks)
    has_succeeded = all(rank.returned for rank in last.ranks)
    # A function without torch trains nothing: copies that run on their own are what it wants.
    if packed.uses_torch and last.world_size > 1 and has_succeeded and not has_group:
        lines.append(
            f"no rank made a process group: {last.world_size} copies of {last.name} ran on their "
            "own (make an Accelerator in it, or call torch.distributed.init_process_group)"
        )
    return lines


def _lost_models(last: RunState, packed: PackedCall) -> list[str]:
    """A line if ranks used models of the notebook and none of them returned anything."""
    has_nothing = all(rank.returned and rank.returned_none for rank in last.ranks)
    if not packed.models or not has_nothing:
        return []
    names = ", ".join(f"`{name}`" for name in packed.models)
    line = (
        f"{last.name} used {names} of the notebook and returned None: the notebook's own stays as "
        "it was; return what you want to keep"
    )
    return [line]
