"""Metrics of a run as matplotlib axes, for those who have matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["plot_metrics"]


def plot_metrics(metrics: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> list[Any]:
    """One axes a metric, with a line a rank; a value without a step is counted.

    Raises:
        ConfigError: no metric has one of the names.
        ImportError: matplotlib is not installed.
    """
    curves = _curves(metrics)
    unknown = [name for name in names if name not in curves]
    if unknown:
        logged = ", ".join(map(repr, curves)) or "none"
        raise ConfigError(f"no metric is called {unknown[0]!r}; this run logged {logged}")
    return _draw({name: curves[name] for name in names} if names else curves)


def _curves(
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, dict[int, list[tuple[float, float]]]]:
    curves: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for row in metrics:
        points = curves.setdefault(row["name"], {}).setdefault(row["rank"], [])
        points.append((len(points) if row["step"] is None else row["step"], row["value"]))
    return curves


def _draw(curves: Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]) -> list[Any]:
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise ImportError("run.plot() needs matplotlib: pip install matplotlib") from None
    if not curves:
        return []
    width = 4.5 * len(curves)
    _, axes = plt.subplots(1, len(curves), figsize=(width, 3), squeeze=False)
    for axis, (name, by_rank) in zip(axes[0], curves.items(), strict=True):
        for rank, points in sorted(by_rank.items()):
            axis.plot(*zip(*points, strict=True), label=f"rank {rank}")
        axis.set_title(name)
        axis.set_xlabel("step")
        if len(by_rank) > 1:
            axis.legend()
    return list(axes[0])
