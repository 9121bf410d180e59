"""The table of engines (ways to start ranks): description, class and supported settings of each.

To add an engine, add a file in ``launch/engines/`` and a row here. Its class is imported only when
a launch uses it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """Facts about an engine that can be checked without importing it.

    Attributes:
        about: where its ranks run, in a few words for the user.
        path: module below ``launch.engines``, a colon, and the engine's class.
        obeys: which of ``num_nodes`` and ``max_restarts`` it supports; others are refused.
        max_ranks: None for any number.
        runs_scripts: whether ``notebook-accel launch``, by torchrun, accepts it.
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
