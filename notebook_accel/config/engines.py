"""The engines, one row each: what a person reads of it, and which settings it obeys.

A new engine is a file in ``launch/engines/`` and its row here. Its class is imported when a launch
takes it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ENGINES", "EngineKind"]


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """What the settings know of an engine.

    Attributes:
        about: where its ranks are, in a few words.
        path: module and name of its class, with a colon; the module is below ``launch.engines``.
        obeys: the settings that it obeys and others refuse, of ``num_nodes`` and ``max_restarts``.
        max_ranks: how many ranks it can have; None: any number.
        runs_scripts: whether torchrun starts the same ranks for a script.
    """

    about: str
    path: str
    obeys: tuple[str, ...] = ()
    max_ranks: int | None = None
    runs_scripts: bool = False


ENGINES: dict[str, EngineKind] = {
    "auto": EngineKind(about="the one that fits", path=".local:LocalEngine", runs_scripts=True),
    "local": EngineKind(
        about="processes of this machine", path=".local:LocalEngine", runs_scripts=True
    ),
    "elastic": EngineKind(
        about="several machines, or restarts after a failure",
        path=".elastic:ElasticEngine",
        obeys=("num_nodes", "max_restarts"),
        runs_scripts=True,
    ),
    "ray": EngineKind(
        about="a Ray cluster, which chooses the machines; ``num_processes`` counts all ranks",
        path=".ray:RayEngine",
        obeys=("max_restarts",),
    ),
    "inline": EngineKind(
        about="the kernel, for a debugger", path=".inline:InlineEngine", max_ranks=1
    ),
    "xla": EngineKind(about="TPUs by torch_xla", path=".xla:XlaEngine"),
}
