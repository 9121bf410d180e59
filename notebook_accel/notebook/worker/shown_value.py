"""The value of a cell's last expression, as a rank sends it to the notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ShownValue:
    """A last expression's value by MIME type, binary data in base64."""

    data: Mapping[str, str]

    @property
    def text(self) -> str:
        """The plain text; "" if it has no such form."""
        return self.data.get("text/plain", "")

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, str]:
        return dict(self.data)

    def __repr__(self) -> str:
        return self.text
