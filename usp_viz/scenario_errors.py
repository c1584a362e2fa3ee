"""From pydantic's errors to one sentence a person can act on: key, value, limit, what is legal."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from usp_viz.errors import InvalidScenario, shorten

Loc = tuple[int | str, ...]

_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text (in quotes)",
    "string_unicode": "Unicode text (no lone surrogates)",
    "finite_number": "a finite number",
    "none_required": "null (no named mistakes are built yet)",
}
_GIVEN = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    str: "text",
    type(None): "null",
    list: "a list",
    tuple: "a list",
    Mapping: "a mapping",
    object: "something else",
}
_OR = {
    "tensors.values": "{list: [a number for each row]}",
    "tokens.shards": "a list of rows by position",
    "attention.seq_lens": "a list of lengths",
}
"""What some keys take besides a word."""
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_TAGS = ("<word>", "<list>", "<mapping>", "function-", "tuple[")
"""How pydantic calls the members of our unions; no part of a key."""
_MASKS = "attention.mask"


def near(value: int, top: int, legal: Callable[[int], bool], reach: int = 100_000) -> list[int]:
    """The nearest legal integers in [1, top] below and above `value`."""
    below = next((n for n in range(min(value, top), max(0, value - reach), -1) if legal(n)), None)
    above = next((n for n in range(max(1, value), min(top, value + reach) + 1) if legal(n)), None)
    found = {n for n in (below, above) if n is not None}
    return sorted(found, key=lambda n: (abs(n - value), n))


def adding_up(lengths: Sequence[int], total: int) -> list[int]:
    """As many of these lengths as fit into `total`, and the rest in the last."""
    result: list[int] = []
    left = total
    for length in lengths[:-1]:
        result.append(min(length, left))
        left -= result[-1]
    return [*result, left]


def closest(word: Any, known: Sequence[str]) -> list[str]:
    """Known names that `word` may have meant, best first; likenesses only when nothing is close."""
    folded = {name.lower(): name for name in known}
    match = partial(difflib.get_close_matches, str(word)[:100].lower(), list(folded), n=3)
    return [folded[name] for name in match(cutoff=0.8) or match(cutoff=0.5)]


def explain(error: ValidationError, written: Any = None) -> InvalidScenario:
    """The first problem of a pydantic error as an `InvalidScenario`, counting the rest.

    A wrong key comes first: what else is missing usually follows from it.

    Args:
        error: What pydantic says.
        written: What it was given; says whether a mask stands alone or in a list.
    """
    details = sorted(error.errors(include_url=False), key=lambda d: d["type"] != "extra_forbidden")
    first = _explain_one(details[0], _has_many_masks(written))
    more = len(details) - 1
    return InvalidScenario(first.key, first.value, first.limit, first.nearest, more)


def _explain_one(detail: ErrorDetails, indexed: bool) -> InvalidScenario:
    kind, ctx, value = detail["type"], detail.get("ctx", {}), detail.get("input")
    if isinstance(ctx.get("error"), InvalidScenario):
        return ctx["error"]
    if kind == "extra_forbidden":
        return _unknown_key(detail["loc"], value, indexed)
    key = _dotted(detail["loc"], indexed)
    if ".holes" in key and kind in ("missing", "tuple_type", "too_long"):
        key = key.partition(".holes")[0] + ".holes"
        return InvalidScenario(key, value, "holes are pairs [start, end), such as [[5, 9]]")
    if kind == "missing":
        return InvalidScenario(key, None, "required, and not given")
    if kind.startswith("union_tag_") and key.startswith(_MASKS):
        return _no_mask(key, value)
    if kind == "literal_error":
        return _no_word(key, value, re.findall(r"'([^']*)'", str(ctx.get("expected"))))
    if kind in ("tuple_type", "list_type"):
        example = f", such as [{value}]" if type(value) is int else ""
        return InvalidScenario(key, value, f"expected a list{example}, got {_given(value)}")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        keys = ", ".join(_known_keys(detail["loc"]))
        return InvalidScenario(key, value, f"expected a mapping with {keys}; got {_given(value)}")
    if kind == "string_pattern_mismatch":
        slug = re.sub(r"[^a-z0-9]+", "-", str(value)[:80].lower()).strip("-")
        limit = "lower-case letters, digits and inner hyphens only"
        return InvalidScenario(key, value, limit, [slug] if slug else [])
    if isinstance(value, float) and math.isnan(value) and ctx:  # beyond any bound, says pydantic
        kind, ctx = "finite_number", {}
    if bound := _bound(key, value, ctx):
        return bound
    wanted = _WANTED.get(kind, detail["msg"][:1].lower() + detail["msg"][1:])
    limit = f"expected {wanted}, got {_given(value)}"
    return InvalidScenario(key, value, limit, _converted(kind, value))


def _unknown_key(loc: Loc, value: Any, indexed: bool) -> InvalidScenario:
    above, word = _dotted(loc[:-1], indexed), str(loc[-1])
    key = f"{above}.{_name(word)}" if above else _name(word)
    known, everywhere = _known_keys(loc[:-1]), list(_paths())
    if above.startswith(_MASKS) and word in _mask_kinds() and known[0] in _mask_kinds():
        limit = f"a mask has one kind; write a list: [{{{known[0]}: …}}, {{{word}: …}}]"
        return InvalidScenario(f"{above.rpartition('.')[0]}.{word}", value, limit)
    if word in everywhere:
        parent, _, last = word.rpartition(".")
        limit = f"dotted keys are for --set; in a file, {last} stands inside {parent}"
        return InvalidScenario(key, value, limit)
    homes = [path for path in everywhere if path.endswith(f".{word}")][:3]
    limit = f"unknown key; known here: {', '.join(known)}"
    return InvalidScenario(key, value, limit, homes or closest(word, known))


def _no_mask(key: str, value: Any) -> InvalidScenario:
    kinds = _mask_kinds()
    if isinstance(value, Mapping) and value:
        word, spec = next(iter(cast("Mapping[Any, Any]", value).items()))
        limit = f"no such mask; there are {', '.join(kinds)}"
        return InvalidScenario(f"{key}.{_name(word)}", spec, limit, closest(word, kinds))
    limit = f"none, or a mapping with one of {', '.join(kinds)}, or a list of such mappings"
    nearest = closest(value, ["none"]) if isinstance(value, str) and value != "none" else []
    return InvalidScenario(key, value, limit, nearest)


def _no_word(key: str, value: Any, words: list[str]) -> InvalidScenario:
    if key == "engine" and ":" in str(value):
        limit = "a scenario names an engine, never code to load"
        return InvalidScenario(key, value, limit, ["builtin"])
    limit = f"one of {', '.join(words)}" + (f", or {_OR[key]}" if key in _OR else "")
    nearest = closest(value, words) if isinstance(value, (str, int, float)) else []
    return InvalidScenario(key, value, limit, nearest)


def _bound(key: str, value: Any, ctx: Mapping[str, Any]) -> InvalidScenario | None:
    """What a number or a length may be at most or at least."""
    if key == "schema_version":
        return InvalidScenario(key, value, "this program reads schema_version 1", [1])
    for name, words in (("max_length", "at most"), ("min_length", "at least")):
        if name in ctx:
            thing = "character" if isinstance(value, str) else "item"
            plural = "s" if ctx[name] != 1 else ""
            return InvalidScenario(key, value, f"{words} {ctx[name]} {thing}{plural}")
    for bound, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if bound in ctx:
            nearest = [ctx[bound]] if sign.endswith("=") else []
            return InvalidScenario(key, value, f"must be {sign} {ctx[bound]}", nearest)
    return None


def _given(value: Any) -> str:
    return next(words for kind, words in _GIVEN.items() if isinstance(value, kind))


def _converted(kind: str, value: Any) -> list[Any]:
    """What a value of the wrong type was surely meant to be."""
    if kind == "bool_type":
        word = str(value).lower()
        return [word in _YES] if word in _YES + _NO else []
    if kind in ("int_type", "int_from_float", "float_type") and isinstance(value, (str, float)):
        try:
            number = float(value)
        except ValueError:
            return []
        if 1 <= number <= 4096:  # legal for every number of the format
            whole = number.is_integer() and kind != "float_type"
            return [int(number)] if whole else [number] if kind == "float_type" else []
    return []


# -- where in the format -------------------------------------------------------------------------


def _name(word: Any) -> str:
    """A key that somebody made up, fit to be shown."""
    return word if re.fullmatch(r"[\w-]{1,60}", str(word)) else shorten(word)


def _dotted(loc: Loc, indexed: bool) -> str:
    """`('attention', 'mask', 0, 'key', 'key', 'valid')` -> ``attention.mask.key.valid``."""
    text = ""
    for n, part in enumerate(loc):
        if isinstance(part, int):
            text += "" if not indexed and text.endswith(_MASKS) else f"[{part}]"
        elif not part.startswith(_TAGS) and not (n and part == loc[n - 1]):  # nor a mask's tag
            text += f".{part}" if text else part
    return text


def _has_many_masks(written: Any) -> bool:
    for key in ("attention", "mask"):
        written = written.get(key) if isinstance(written, Mapping) else None  # type: ignore[reportUnknownMemberType]
    return isinstance(written, (list, tuple)) and len(written) > 1  # type: ignore[reportUnknownArgumentType]


def _mask_kinds() -> list[str]:
    from usp_viz.scenario import MASK_KINDS

    return list(MASK_KINDS)


def _known_keys(loc: Loc) -> list[str]:
    """Field names of the model at `loc`."""
    from usp_viz.scenario import Scenario

    node: Any = Scenario
    for part in loc:
        node = _step(node, part)
    models = _models(node)
    return sorted(models[0].model_fields) if models else []


def _paths(model: type[BaseModel] | None = None, above: str = "") -> Iterator[str]:
    """Every dotted key of the format."""
    from usp_viz.scenario import Scenario

    for name, field in (model or Scenario).model_fields.items():
        yield above + name
        for below in _models(field.annotation):
            yield from _paths(below, f"{above}{name}.")


def _step(node: Any, part: int | str) -> Any:
    """One step down a model's annotations; union members are found by the key they hold."""
    if isinstance(part, int):
        return node
    models = _models(node)
    holders = [model for model in models if part in model.model_fields]
    if not holders:
        return node
    return holders[0].model_fields[part].annotation if node is holders[0] else holders[0]


def _models(node: Any) -> list[type[BaseModel]]:
    """The models in an annotation, in order."""
    if isinstance(node, type) and issubclass(node, BaseModel):
        return [node]
    parts: tuple[Any, ...] = getattr(cast("Any", node), "__args__", ())
    return [model for part in parts for model in _models(part)]
