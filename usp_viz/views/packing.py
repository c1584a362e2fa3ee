"""Small encodings that keep a scene compact and lose nothing.

A trace of many ranks repeats itself: rank after rank does the same to the next rows. A *column* of
whole numbers is stored as arithmetic runs when that is shorter, spans that recur get a number in a
`Table`, and a stripe of single rows is one run with a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from usp_viz.layout import Spans

Column = list[int] | dict[str, list[int]]
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
"""64 characters: each stands for three cells of 0, 1, 2 or 3."""


def pack(values: Sequence[int]) -> Column:
    """The values, or ``{"runs": [first, how many, step, …]}`` where that takes fewer numbers.

    >>> pack([4, 5, 6, 7, 0, 0, 0, 0])
    {'runs': [4, 4, 1, 0, 4, 0]}
    >>> pack([3, 1, 2])
    [3, 1, 2]
    """
    runs: list[int] = []
    at = 0
    while at < len(values):
        step = values[at + 1] - values[at] if at + 1 < len(values) else 0
        stop = at + 1
        while stop < len(values) and values[stop] - values[stop - 1] == step:
            stop += 1
        runs += (values[at], stop - at, step)
        at = stop
    return {"runs": runs} if len(runs) < len(values) else list(values)


def unpack(column: Column) -> list[int]:
    """The inverse of `pack`."""
    if isinstance(column, list):
        return column
    runs = column["runs"]
    triples = zip(runs[::3], runs[1::3], runs[2::3], strict=True)
    return [first + n * step for first, count, step in triples for n in range(count)]


def runs_of(spans: Spans) -> list[int]:
    """Spans as flat (start, count, step); neighbouring single rows at even distances are one run.

    >>> runs_of(((0, 4), (8, 9), (11, 12), (14, 15)))
    [0, 4, 1, 8, 3, 3]
    """
    runs: list[int] = []
    for start, stop in spans:
        if runs and stop - start == 1 and (runs[-2] == 1 or runs[-1] > 1):
            last = runs[-3] + (runs[-2] - 1) * runs[-1]
            if runs[-2] == 1 and start - last > 1:
                runs[-2:] = (2, start - last)
                continue
            if runs[-2] > 1 and start - last == runs[-1]:
                runs[-2] += 1
                continue
        runs += (start, stop - start, 1)
    return runs


def spans_from(runs: Sequence[int]) -> Spans:
    """The inverse of `runs_of`."""

    def spans() -> Iterator[tuple[int, int]]:
        for start, count, step in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
            if step == 1:
                yield start, start + count
            else:
                for row in range(start, start + count * step, step):
                    yield row, row + 1

    return tuple(spans())


@dataclass(frozen=True, slots=True)
class Table:
    """Spans, each kept once; number 0 is nothing."""

    numbers: dict[Spans, int] = field(default_factory=lambda: {(): 0})

    def add(self, spans: Spans) -> int:
        """The number of these spans."""
        return self.numbers.setdefault(spans, len(self.numbers))

    def to_json(self) -> list[list[int]]:
        """The spans as `runs_of`, by number."""
        return [runs_of(spans) for spans in self.numbers]


def pack_cells(cells: Iterable[int]) -> str:
    """Cells of 0 … 3, three to a character, or as ``"~"`` and run lengths where that is shorter.

    >>> pack_cells([2] * 40 + [0] * 8), pack_cells([1, 0, 2, 3])
    ('~2,40,0,8', 'hD')
    """
    values = list(cells)
    runs: list[int] = []
    for value in values:
        if runs and runs[-2] == value:
            runs[-1] += 1
        else:
            runs += (value, 1)
    as_runs = "~" + ",".join(map(str, runs))
    padded = values + [0] * (-len(values) % 3)
    triples = zip(padded[::3], padded[1::3], padded[2::3], strict=True)
    as_cells = "".join(DIGITS[a + 4 * b + 16 * c] for a, b, c in triples)
    return as_runs if len(as_runs) < len(as_cells) else as_cells


def unpack_cells(text: str, count: int) -> list[int]:
    """The inverse of `pack_cells`."""
    if text.startswith("~"):
        numbers = [int(n) for n in text[1:].split(",") if n]
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return [value for value, length in pairs for _ in range(length)]
    triples = (DIGITS.index(digit) for digit in text)
    cells = [(triple >> shift) & 3 for triple in triples for shift in (0, 2, 4)]
    return cells[:count]


def records(group: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """The rows of a table that is stored as packed columns."""
    columns = {name: unpack(column) for name, column in group.items()}
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))
