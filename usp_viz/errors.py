"""Every error this package raises on purpose.

    UspVizError
    ├── InvalidScenario (ValueError)       what was asked for is impossible, or over a cap
    ├── MissingRequirement (RuntimeError)  possible, but not with what this machine has
    ├── RunCancelled (RuntimeError)        somebody asked the run to stop
    └── NotExpressible (NotImplementedError)  no argument of a library's layer can say it

A refusal of an attention layer is not in this tree: it is re-raised on the ranks with the very
class and message of the library that refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def shorten(value: Any, limit: int = 60) -> str:
    """`repr` of a user's value, cut so that a message stays one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # ints beyond the str-digit limit, absurd nesting
        text = f"<{type(value).__name__} too large to print>"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def printable(text: str) -> str:
    """`text` with whatever could break a line, steer a terminal or fail to encode escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class UspVizError(Exception):
    """Base of all errors raised on purpose."""


class InvalidScenario(UspVizError, ValueError):
    """A scenario that cannot be: says which key, its value, the limit, and what is legal nearby.

    Attributes:
        key: Dotted key, e.g. ``tokens.shards``; empty when the whole file is at fault.
        value: The offending value.
        limit: What would be legal, in words.
        nearest: The nearest legal values, best first; may be empty.
    """

    def __init__(
        self, key: str, value: Any, limit: str, nearest: Sequence[Any] = (), more: int = 0
    ) -> None:
        self.key = key
        self.value = value
        self.limit = limit
        self.nearest = tuple(nearest)
        self.more = more
        text = f"{key}: {shorten(value)} — {limit}" if key else limit
        if self.nearest:
            text += f"; nearest legal: {', '.join(shorten(n) for n in self.nearest)}"
        if more:
            text += f" (and {more} more problem{'s' if more > 1 else ''})"
        super().__init__(printable(text))

    def as_json(self) -> dict[str, Any]:
        """The `error` object of a result with outcome ``invalid``."""
        value = self.value
        if not (value is None or (isinstance(value, (int, float)) and abs(value) < 1e300)):
            value = shorten(value, 200)  # also of NaN, infinities and ints beyond any JSON reader
        return {
            "class": "InvalidScenario",
            "message": str(self),
            "key": printable(self.key),
            "value": value,
            "limit": self.limit,
            "nearest": list(self.nearest),
        }


class MissingRequirement(UspVizError, RuntimeError):
    """Something this machine lacks: a GPU, an optional package, a browser.

    Attributes:
        what: What is missing.
        install: The command that brings it, or what to do instead.
    """

    def __init__(self, what: str, install: str) -> None:
        self.what = what
        self.install = install
        super().__init__(f"{what}. {install}")


class RunCancelled(UspVizError, RuntimeError):
    """The run was cancelled before it ended."""


class NotExpressible(UspVizError, NotImplementedError):
    """A scenario that no argument of the layer in question can say."""
