"""Which side of a session assigned a name last: the notebook, or the ranks.

    notebook: x = 1         the notebook's: pushed when a cell of the session uses x
    session:  x = 2         the session's: the notebook's x stays at home
    notebook: x = 3         the notebook's again, also while a call goes on that assigns x
    %accelerate pull x      the session's: both have the same, and neither is newer
    notebook: del x         the ranks keep what they got

A name of the notebook's is pushed again when its object changed, as a list does that was appended
to. What the ranks do to what they got, such as training a model, changes nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.payload.names import look_at
from notebook_accel.notebook.used_names import is_history

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Ownership", "Push"]

# From this size on a push is worth a line: every rank gets a copy of its own.
_LARGE_BYTES = 100_000_000
# What IPython puts into a notebook beside its history.
_IPYTHONS = ("exit", "get_ipython", "open", "quit")


@dataclass(frozen=True, kw_only=True)
class Push:
    """Names on their way to the session.

    Attributes:
        values: the notebook's objects.
        lines: about large ones, for the person.
        fills: of the names, those that some ranks have assigned, and others do not have: they go
            to the others alone.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    fills: frozenset[str] = frozenset()
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class _AgreedName:
    """What the notebook had under a name at the last push, pull, or assignment by the session.

    Attributes:
        key: identity of the notebook's object then; None where it had none.
        digest: of that object; None where the session assigned the name.
        is_pulled: whether the notebook's object is a copy of the session's.
    """

    key: int | None
    digest: bytes | None
    is_pulled: bool = False


class Ownership:
    """The names that one of the two sides, or both, have.

    Args:
        namespace: the notebook's.
        hidden: what of it IPython does not list, by name: its own, and what startup files,
            ``%pylab`` and the like have put there for the person.
    """

    def __init__(self, namespace: Mapping[str, Any], hidden: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._hidden = hidden
        self._known: dict[str, _AgreedName] = {}
        # Globals that the session's functions, classes and objects look up, by their names.
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
        """Record that a call is sent; later assignments of the notebook win over the call's."""
        self._num_calls += 1
        self._keys_at_call = self._keys()

    def note_assigned(self, names: Iterable[str]) -> None:
        """Record the names that a cell of the notebook assigned."""
        for name in names:
            agreed = self._known.get(name) if name in self._agreed_in_cell else None
            # It was pushed or pulled after the cell had assigned it: what the ranks have made of
            # it meanwhile is newer.
            if agreed is None or agreed.key != self._key(name):
                self._anew[name] = self._num_calls
        self._agreed_in_cell.clear()

    def note_session_assigned(self, names: Iterable[str]) -> None:
        """Record the names that the newest call assigned in the session."""
        for name in names:
            # One that the notebook has assigned since that call was sent is the notebook's.
            if self._anew.get(name) != self._num_calls:
                self._known[name] = _AgreedName(self._keys_at_call.get(name), None)
                self._anew.pop(name, None)

    def note_uses(self, uses: Sequence[Mapping[str, frozenset[str]]]) -> None:
        """Record which globals the code of each name uses, as each rank reports it."""
        for name in {name for one in uses for name in one}:
            self._uses[name] = frozenset[str]().union(*(one.get(name, ()) for one in uses))

    def note_pulled(self, name: str) -> None:
        """Record that the notebook has pulled this name."""
        self._agree(name, _AgreedName(self._key(name), None, is_pulled=True))

    def push_again(self, names: Iterable[str]) -> None:
        """Mark pushed names that not all ranks received, so that the next use pushes them again."""
        for name in names:
            self._anew[name] = self._num_calls

    def keep_only(self, names: Sequence[frozenset[str]]) -> None:
        """The ranks have no other names than these."""
        kept = frozenset[str]().union(*names)
        self._known = {name: known for name, known in self._known.items() if name in kept}
        self._uses = {name: used for name, used in self._uses.items() if name in kept}
        self._in_parts = kept.difference(frozenset.intersection(*names))

    def plan_push(self, used: Iterable[str], forced: Iterable[str] = ()) -> Push:
        """Return the variables that must be pushed before a cell runs.

        Args:
            used: names that the cell uses. Those that functions and classes use belong to them,
                also of functions and classes that live in the session.
            forced: names that are pushed whoever assigned them.

        Raises:
            LaunchError: a value cannot travel.
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
            if is_newer or known is None or known.digest != facts.digest:
                values[name] = self._namespace[name]
                if facts.num_bytes > _LARGE_BYTES:
                    lines.append(f"pushed `{name}` ({facts.num_bytes / 1e6:,.0f} MB)")
        return Push(
            values=values,
            lines=tuple(lines),
            fills=frozenset(fills),
        )

    def note_pushed(self, push: Push) -> None:
        """Record that the session has received a push."""
        for name, value in push.values.items():
            if name in push.fills:
                continue
            # Looked at again: the first pickle of an object may leave something in its class.
            self._agree(name, _AgreedName(id(value), look_at(name, value).digest))

    def is_ours(self, name: str) -> bool:
        """Return whether a person, not IPython, assigned this name in the notebook."""
        if name not in self._namespace or is_history(name):
            return False
        if name not in _IPYTHONS and not name.startswith("__"):
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
