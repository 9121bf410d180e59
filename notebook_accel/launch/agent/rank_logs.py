"""Where an agent keeps its ranks' output files, and how the kernel gets their content.

    rank --descriptors 1 and 2--> file --FileTail--> the newest lines, as messages
                                    |
                                    +-- on another machine than the kernel: its bytes, as a stream

The run's folder is on the kernel's machine. An agent on that machine writes the files into the
folder. An agent on another machine writes them into its own scratch folder, and sends their bytes
to the kernel, which saves them in the run's folder. So the full output of each rank ends up in the
run's folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from notebook_accel import wire
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.transport.frames import FramedChannel
from notebook_accel.system import scratch
from notebook_accel.system.own_files import log_path, open_log


class RankLogs:
    """Opens the output files of an agent's ranks, one each, in a folder that the kernel reads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, rank: int) -> Path:
        return log_path(self._folder, rank)

    def open(self, rank: int) -> int:
        """Open the output file of a rank; return its descriptor, which the caller closes."""
        return open_log(self._folder, rank)

    def end(self, rank: int) -> None:
        """Finish the output file of a rank whose process has ended.

        Here this does nothing; the subclass for another machine ends the file's stream of bytes.
        """


class _LogsSent(RankLogs):
    """Opens output files in the agent's scratch folder, and sends their bytes to the kernel.

    For an agent on another machine than the kernel. The bytes flow once the kernel has asked for
    them (``FramedChannel.save``).
    """

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
    """Return the object that opens the output files of an agent's ranks.

    If ``launch.log_dir`` is set, the files lie in that folder. If it is None, the kernel is on
    another machine, and the files' bytes are sent to it over ``channel``.
    """
    if launch.log_dir is not None:
        return RankLogs(Path(launch.log_dir))
    assert isinstance(channel, FramedChannel), "wire.ForkAgent.is_remote"
    return _LogsSent(channel, launch.run)
