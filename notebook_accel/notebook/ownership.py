"""Keep track of who assigned a variable last: the notebook, or the session (the ranks).

    notebook: x = 1         the notebook's: pushed when a cell of the session uses x
    session:  x = 2         the session's: the notebook's x is not pushed any more
    notebook: x = 3         the notebook's again, even if a call that assigns x still runs
    %accelerate pull x      the session's: both have the same value, so nothing is to be pushed
    notebook: del x         the ranks keep the value that they were given

To push is to copy a variable from the notebook to all ranks, to pull is to copy it back. A variable
of the notebook is pushed again when its object was changed in place, such as a list that was
appended to. Changes in place on the ranks, such as the training of a model, do not count as an
assignment.

To find what has changed, each variable is pickled into a hash, and the pickle is not stored. Arrays
are compared by all of their bytes, which takes up to a second for each gigabyte. Large tensors are
compared by torch's count of in-place changes, by their address, and, on the CPU, by a sample of
their bytes, so that a large model costs little more than a small one.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from notebook_accel.launch.payload.culprits import cannot_be_pushed, pickled
from notebook_accel.launch.payload.pickling import NOWHERE, SessionPickler, itself, memory_of
from notebook_accel.launch.text import used_names
from notebook_accel.private import of_torch

# From this size on a push is worth a line: every rank gets a copy of its own.
_LARGE_BYTES = 100_000_000
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


# What is written through `tensor.data`, or through an array of numpy on the memory of a tensor,
# counts no version. Up to this size all of the memory on the CPU is compared. Above it samples of
# it are, which see what changes all of it (a moving average of weights), but maybe not one element.
_SMALL_STORAGE_BYTES = 1_000_000
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1_024


@dataclass(frozen=True, kw_only=True)
class Push:
    """Variables sent with a call; a rank that has a name of ``fills`` keeps its own value.

    ``reached`` are all names that the call uses, also by what it calls.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    fills: frozenset[str] = frozenset()
    lines: tuple[str, ...] = ()
    reached: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _AgreedName:
    """The notebook's object under a name at the newest push, pull, or assignment by the session.

    Attributes:
        key: its ``id``; None where the notebook had no such variable.
        digest: hash of its pickle when pushed; None after a pull or the session's assignment.
    """

    key: int | None
    digest: bytes | None
    is_pulled: bool = False


class Ownership:
    """Records which side assigned each variable last: the notebook or its session.

    ``hidden`` are variables that IPython does not list as the user's, as those of startup files.
    """

    def __init__(self, namespace: Mapping[str, Any], hidden: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._hidden = hidden
        self._known: dict[str, _AgreedName] = {}
        # Globals that the session's functions, classes and objects look up, by their names, as the
        # cells say that made them; and so do the notebook's, of which cells make more.
        self._uses: dict[str, frozenset[str]] = {}
        # Names of the session that not all ranks have.
        self._in_parts: frozenset[str] = frozenset()
        self._num_calls = 0
        # What the notebook had when the newest call was sent, by identity.
        self._keys_at_call = self._keys()
        # Assigned in a cell of the notebook since, maybe the very same object again; and how many
        # calls had been sent by then.
        self._anew: dict[str, int] = {}
        # Agreed on since the end of the newest cell of the notebook.
        self._agreed_in_cell: set[str] = set()

    def note_call(self) -> None:
        """What the notebook assigns after this stays its own, even if the call assigns it."""
        self._num_calls += 1
        self._keys_at_call = self._keys()

    def note_assigned(self, names: Iterable[str]) -> None:
        """Called at a cell's end; a name pushed or pulled after the cell assigned it is skipped."""
        for name in names:
            agreed = self._known.get(name) if name in self._agreed_in_cell else None
            # It was pushed or pulled after the cell had assigned it: what the ranks have made of
            # it meanwhile is newer.
            if agreed is None or agreed.key != self._key(name):
                self._anew[name] = self._num_calls
        self._agreed_in_cell.clear()

    def note_session_assigned(self, names: Iterable[str]) -> None:
        """Called after the newest call's end."""
        for name in names:
            # One that the notebook has assigned since that call was sent is the notebook's.
            if self._anew.get(name) != self._num_calls:
                self._known[name] = _AgreedName(self._keys_at_call.get(name), None)
                self._anew.pop(name, None)

    def note_uses(self, code: str) -> None:
        """Record of a cell of the session which globals the code behind each name uses.

        What a definition uses, and what any other statement uses of definitions: ``net = Net()``
        uses what ``Net`` does, and ``rows = read(path)`` has no need of a newer ``path``. Uses are
        never taken back: ``net = prepare(net)`` has those of before, and a cell may fail halfway.
        """
        for node in used_names.parsed(code).body:
            for part in ast.walk(node):
                for text in used_names.texts_for_ipython(part):  # the statement of %time
                    self.note_uses(text)
            names = used_names.names_in([node])
            used = frozenset(names.used)
            if not any(isinstance(part, _DEFINITIONS) for part in ast.walk(node)):
                made_of = used & self._uses.keys()
                used = frozenset(name for name in made_of if not self.is_ours(name))
                used = used.union(*(self._uses[name] for name in made_of))
            # Of ``Net.forward = f`` the class.
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            parts = (part for target in targets if target for part in ast.walk(target))
            owners = {part.id for part in parts if isinstance(part, ast.Name)}
            for name in owners | names.assigned:
                self._uses[name] = self._uses.get(name, frozenset()) | used

    def note_pulled(self, name: str) -> None:
        self._agree(name, _AgreedName(self._key(name), None, is_pulled=True))

    def push_again(self, names: Iterable[str]) -> None:
        """Mark names whose push did not reach all ranks."""
        for name in names:
            self._anew[name] = self._num_calls

    def keep_only(self, names: Sequence[frozenset[str]]) -> None:
        """Forget names that no rank has, and note which only some have; one set per rank."""
        kept = frozenset[str]().union(*names)
        self._known = {name: known for name, known in self._known.items() if name in kept}
        self._uses = {name: used for name, used in self._uses.items() if name in kept}
        self._in_parts = kept.difference(frozenset.intersection(*names))

    def plan_push(self, used: Iterable[str], forced: Iterable[str] = ()) -> Push:
        """Return what a cell uses, also indirectly, and the notebook changed since ranks got it.

        Args:
            forced: names to push even if the session assigned them last.

        Raises:
            LaunchError: a value cannot be pickled.
        """
        values: dict[str, Any] = {}
        lines: list[str] = []
        fills: set[str] = set()
        forced = frozenset(forced)
        seen: set[str] = set()
        waiting = [*used, *forced]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            known = self._known.get(name)
            if not self.is_ours(name):
                waiting += self._uses.get(name, ())
                continue
            is_newer = (
                known is None
                or name in forced
                or name in self._anew
                or self._key(name) != known.key
            )
            if not is_newer and known is not None and known.digest is None:
                waiting += self._uses.get(name, ())
                if known.is_pulled or name not in self._in_parts:
                    continue
                fills.add(name)
            facts = look_at(name, self._namespace[name])
            waiting += facts.names
            if facts.names:
                self._uses[name] = facts.names
            if is_newer or known is None or known.digest != facts.digest:
                values[name] = self._namespace[name]
                if facts.num_bytes > _LARGE_BYTES:
                    lines.append(f"pushed `{name}` ({facts.num_bytes / 1e6:,.0f} MB)")
        reached = frozenset(seen)
        return Push(values=values, lines=tuple(lines), fills=frozenset(fills), reached=reached)

    def note_pushed(self, push: Push) -> None:
        for name, value in push.values.items():
            if name in push.fills:
                continue
            # Looked at again: the first pickle of an object may leave something in its class.
            self._agree(name, _AgreedName(id(value), look_at(name, value).digest))

    def is_ours(self, name: str) -> bool:
        """Return whether the notebook has this name and a person, not IPython, assigned it."""
        if name not in self._namespace or used_names.is_history(name):
            return False
        if name not in used_names.OF_IPYTHON and not name.startswith("__"):
            return True
        return name not in self._hidden or self._hidden[name] is not self._namespace[name]

    def _agree(self, name: str, agreed: _AgreedName) -> None:
        self._known[name] = agreed
        self._anew.pop(name, None)
        self._agreed_in_cell.add(name)

    def _keys(self) -> dict[str, int]:
        return {name: id(value) for name, value in list(self._namespace.items())}

    def _key(self, name: str) -> int | None:
        return id(self._namespace[name]) if name in self._namespace else None


# ---- whether a value has changed -------------------------------------------------------------


@dataclass(frozen=True)
class NameFacts:
    """Facts about a notebook variable: a digest of its value, the names it uses, its size."""

    digest: bytes
    names: frozenset[str]
    num_bytes: int


def look_at(name: str, value: object) -> NameFacts:
    """Return the facts about a notebook variable."""

    def look() -> NameFacts:
        pickler = _LookingPickler()
        pickler.dump(value)
        return NameFacts(pickler.hash.digest(), frozenset(pickler.names), pickler.num_bytes)

    return pickled(look, partial(cannot_be_pushed, name, value))


def names_used(value: object) -> frozenset[str]:
    """Return the names of the globals that functions and classes in ``value`` use."""
    pickler = _NamesPickler(NOWHERE, lambda _buffer: None)
    pickler.dump(value)
    return frozenset(pickler.names)


class _NamesPickler(SessionPickler):
    """Collects only the names of used globals, and reads no memory of tensors and arrays."""

    def _reduce_storage(self, _storage: Any) -> Any:
        # What is on a device would be copied to the host.
        return itself, (None,)


class _LookingPickler(SessionPickler):
    """Pickles a value into a digest, without the memory of its tensors and arrays.

    Checksums of that memory, and the tensors' change counts and addresses, go into the digest
    instead: these suffice to see whether the value has changed.
    """

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        super().__init__(SimpleNamespace(write=self.hash.update), self._take_buffer)
        self.num_bytes = 0

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> None:
        # Arrays know no version: an array that was written to is told by its bytes alone.
        view = buffer.raw()
        self.num_bytes += view.nbytes
        self.hash.update(b"%d," % zlib.crc32(view))

    def _reduce_storage(self, storage: Any) -> Any:
        size = storage.nbytes()
        self.num_bytes += size
        if storage.device.type == "cpu" and size:
            array = memory_of(storage)
            is_small = size <= _SMALL_STORAGE_BYTES
            length, step = (size, size) if is_small else (_SAMPLE_BYTES, size // _NUM_SAMPLES)
            for start in range(0, size, step):
                self.hash.update(b"%d," % zlib.crc32(array.data[start : start + length]))
        return itself, ((storage.data_ptr(), size),)

    def _reduce_tensor(self, tensor: Any) -> Any:
        # A tensor that was made in inference mode has no count of its changes.
        with contextlib.suppress(RuntimeError):
            self.hash.update(b"%d," % of_torch.count_of_changes(tensor))
        return super()._reduce_tensor(tensor)
