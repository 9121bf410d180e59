"""Launches, and calls of sessions, as tests write them: the function first, the rest by names."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from notebook_accel.config import LaunchConfig
from notebook_accel.launch import launcher
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.launcher import Session
from notebook_accel.launch.run import Run
from notebook_accel.launch.view import View


def launch(function: Callable[..., Any], args: Sequence[Any] = (), **asked: Any) -> Run:
    """Launch ``function(*args)``; ``asked`` are the other fields of the request."""
    return launcher.launch(LaunchRequest(function=function, args=args, **asked))


def on_cpu(
    function: Callable[..., Any],
    *args: Any,
    n: int = 2,
    grace: float = 10.0,
    env: Mapping[str, str] | None = None,
    **asked: Any,
) -> Run:
    """Launch ``function(*args)`` on ``n`` ranks without devices."""
    config = LaunchConfig(num_processes=n, devices="cpu", grace=grace, env=env)
    return launch(function, args, config=config, **asked)


def without_gloo(output: str) -> str:
    """What ranks printed, without the lines that gloo prints on torch 2.9."""
    return re.sub(r"(?m)^(\[rank \d+\] )?\[Gloo\] Rank \d.*\n", "", output)


def call(
    session: Session, function: Callable[..., Any], args: Sequence[Any] = (), **asked: Any
) -> Run:
    asked = {"view": View(), **asked}
    return session.call(replace(session.request, function=function, args=args, **asked))
