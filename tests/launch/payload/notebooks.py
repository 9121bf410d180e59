"""A stand-in for a notebook, whose functions are launched on a rank."""

import linecache
import os
import sys
import textwrap
import types
from typing import Any

import pytest

from notebook_accel.launch import payload
from notebook_accel.launch.payload import unpack
from tests.launches import on_cpu


def opened(packed: payload.PackedCall) -> payload.Packed:
    return unpack(packed.parcel.packet, [*map(os.dup, packed.parcel.fds)])


class Notebook:
    """Cells in a ``__main__`` of their own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.main = types.ModuleType("__main__")
        patch.setitem(sys.modules, "__main__", self.main)
        self.sources: list[payload.CellSource] = []

    def __getitem__(self, name: str) -> Any:
        return vars(self.main)[name]

    def cell(self, text: str) -> None:
        number = len(self.sources) + 1
        text = textwrap.dedent(text)
        filename = f"/nowhere/ipykernel_1/{number}.py"
        source = payload.CellSource(filename, f"Cell In[{number}]", text)
        self.sources.append(source)
        lines = text.splitlines(keepends=True)
        linecache.cache[filename] = (len(text), None, lines, filename)
        exec(compile(text, filename, "exec", dont_inherit=True), vars(self.main))

    def pack(self, function: str, *args: Any, **kwargs: Any) -> payload.PackedCall:
        return payload.pack_call(self[function], args, kwargs, sources=self.sources)

    def launch(self, function: str, *args: Any) -> Any:
        return on_cpu(self[function], *args, n=1, sources=self.sources)[0]
