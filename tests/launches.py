"""Launches, and calls of sessions, as tests write them: the function first, the rest by names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from notebook_accel.launch import launcher
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.view import View

if TYPE_CHECKING:
    from notebook_accel.launch.launcher import Session
    from notebook_accel.launch.run import Run

__all__ = ["call", "launch", "without_gloo"]


def launch(function: Callable[..., Any], args: Sequence[Any] = (), **asked: Any) -> Run:
    """Launch ``function(*args)``; ``asked`` are the other fields of the request."""
    return launcher.launch(LaunchRequest(function=function, args=args, **asked))


def without_gloo(output: str) -> str:
    """What ranks printed, without the lines that gloo prints on torch 2.9."""
    return re.sub(r"(?m)^(\[rank \d+\] )?\[Gloo\] Rank \d.*\n", "", output)


def call(
    session: Session, function: Callable[..., Any], args: Sequence[Any] = (), **asked: Any
) -> Run:
    asked = {"view": View(), **asked}
    return session.call(replace(session.request, function=function, args=args, **asked))
