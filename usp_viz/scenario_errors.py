"""Turn pydantic's findings into one sentence that names the key, the value and what is legal."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from usp_viz.errors import InvalidScenario

_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "none_required": "null (no named mistakes are built yet)",
    "missing": "required",
}


def near(value: int, top: int, legal: Callable[[int], bool], reach: int = 100_000) -> list[int]:
    """The nearest legal integers in [1, top] below and above `value`."""
    below = next((n for n in range(min(value, top), max(0, value - reach), -1) if legal(n)), None)
    above = next((n for n in range(max(1, value), min(top, value + reach) + 1) if legal(n)), None)
    found = {n for n in (below, above) if n is not None}
    return sorted(found, key=lambda n: (abs(n - value), n))


def closest(word: Any, known: list[str]) -> list[str]:
    """Known names that `word` may have meant, best first; at most three."""
    return difflib.get_close_matches(str(word)[:100], known, n=3, cutoff=0.5)


def explain(error: ValidationError) -> InvalidScenario:
    """The first problem of a pydantic error as an `InvalidScenario`, counting the rest.

    A wrong key comes first: what else is missing usually follows from it.
    """
    details = sorted(error.errors(include_url=False), key=lambda d: d["type"] != "extra_forbidden")
    first = _explain_one(details[0])
    more = len(details) - 1
    return InvalidScenario(first.key, first.value, first.limit, first.nearest, more)


def _explain_one(detail: ErrorDetails) -> InvalidScenario:
    kind, ctx, value = detail["type"], detail.get("ctx", {}), detail.get("input")
    if isinstance(ctx.get("error"), InvalidScenario):
        return ctx["error"]
    key = _dotted(detail["loc"])
    if kind == "extra_forbidden":
        known = _known_keys(detail["loc"])
        limit = f"unknown key; known here: {', '.join(known)}"
        return InvalidScenario(key, value, limit, closest(detail["loc"][-1], known))
    if kind == "missing":
        return InvalidScenario(key, None, "required, and not given")
    if kind in ("literal_error", "union_tag_invalid", "union_tag_not_found"):
        legal = re.findall(r"'([^']*)'", str(ctx.get("expected") or ctx.get("expected_tags") or ""))
        words = [w for w in legal if not w.startswith("<")] or _mask_words(key)
        if key == "engine" and ":" in str(value):
            limit = "a file cannot name code to load; give module:attr on the command line"
            return InvalidScenario(key, value, limit, ["builtin"])
        return InvalidScenario(key, value, f"one of {', '.join(words)}", closest(value, words))
    for bound, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if bound in ctx:
            nearest = [ctx[bound]] if sign.endswith("=") else []
            return InvalidScenario(key, value, f"must be {sign} {ctx[bound]}", nearest)
    if "max_length" in ctx:
        return InvalidScenario(key, value, f"at most {ctx['max_length']} items or characters")
    if "min_length" in ctx:
        return InvalidScenario(key, value, f"at least {ctx['min_length']} items")
    if kind == "string_pattern_mismatch":
        return InvalidScenario(key, value, "lower-case letters, digits and inner hyphens only")
    wanted = _WANTED.get(kind, detail["msg"][:1].lower() + detail["msg"][1:])
    return InvalidScenario(key, value, f"expected {wanted}, got a {type(value).__name__}")


def _dotted(loc: tuple[int | str, ...]) -> str:
    """`('attention', 'mask', 0, 'key', 'key', 'valid')` -> ``attention.mask[0].key.valid``."""
    text = ""
    for n, part in enumerate(loc):
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.startswith(("<", "function-", "tuple[")) or (n and part == loc[n - 1]):
            continue  # a union's tag, or a mask's tag standing before its own key
        else:
            text += f".{part}" if text else part
    return text


def _mask_words(key: str) -> list[str]:
    return (
        ["none", "key", "tail_pad", "gap_pad", "window", "prefix_lm", "dense"]
        if "mask" in key
        else []
    )


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    """Field names of the model that holds the last part of `loc`."""
    from usp_viz.scenario import Scenario

    node: Any = Scenario
    for part in loc[:-1]:
        node = _step(node, part)
    return sorted(node.model_fields) if _is_model(node) else []


def _is_model(node: Any) -> bool:
    return isinstance(node, type) and issubclass(node, BaseModel)


def _step(node: Any, part: int | str) -> Any:
    """One step down a model's annotations; union members are found by the key they hold."""
    if _is_model(node):
        fields: Mapping[str, Any] = node.model_fields
        return fields[str(part)].annotation if part in fields else node
    if isinstance(part, int):
        return node
    stack = list(getattr(node, "__args__", ()))
    models: list[Any] = []
    while stack:
        item = stack.pop()
        stack.extend(getattr(item, "__args__", ()))
        if _is_model(item):
            models.append(item)
    holders = [m for m in models if part in m.model_fields]
    return holders[0] if holders else models[0] if len(models) == 1 else node
