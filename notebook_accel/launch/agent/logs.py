"""Where the ranks' output lies: in the run's folder, or in the agent's until the kernel has it.

    rank --descriptors 1 and 2--> file --FileTail--> the newest lines, as messages
                                    |
                                    +-- on another machine than the kernel: its bytes, as a stream

Either way the kernel finds the whole output of each rank in its run's folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_accel.launch import wire
from notebook_accel.launch.system import scratch
from notebook_accel.launch.system.log_files import log_path, open_log
from notebook_accel.launch.transport.channel import ProtocolError
from notebook_accel.launch.transport.frames import FramedChannel

if TYPE_CHECKING:
    from notebook_accel.launch.transport.channel import Channel

__all__ = ["RankLogs", "rank_logs"]


class RankLogs:
    """The output files of ranks, in the run's folder, which the kernel reads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, rank: int) -> Path:
        """Return the path of a rank's output file."""
        return log_path(self._folder, rank)

    def open(self, rank: int) -> int:
        """Open the output file of a rank; return its descriptor, which the caller closes."""
        return open_log(self._folder, rank)

    def end(self, rank: int) -> None:
        """Note that a rank's process has ended and its file grows no more."""


class _LogsSent(RankLogs):
    """Output files in the agent's scratch folder, whose bytes are sent to the kernel on request."""

    def __init__(self, channel: FramedChannel, run: str) -> None:
        folder = scratch.folder(run, os.getpid()) / "logs"
        folder.mkdir(mode=0o700, parents=True)
        super().__init__(folder)
        self._channel = channel
        self._run = run
        self._streams: dict[int, int] = {}

    def open(self, rank: int) -> int:
        log = super().open(rank)
        fd = os.open(self.path(rank), os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._streams[rank] = self._channel.follow(fd)
        finally:
            os.close(fd)
        self._channel.post(wire.LogOpened(run=self._run, rank=rank, stream=self._streams[rank]))
        return log

    def end(self, rank: int) -> None:
        self._channel.end(self._streams[rank])


def rank_logs(launch: wire.Launch, channel: Channel) -> RankLogs:
    """Return the output files for the ranks of a launch.

    Raises:
        ProtocolError: the kernel names no folder, and its channel carries no streams.
    """
    if launch.log_dir is not None:
        return RankLogs(Path(launch.log_dir))
    if not isinstance(channel, FramedChannel):
        raise ProtocolError("the kernel names no folder for the output of ranks on its machine")
    return _LogsSent(channel, launch.run)
