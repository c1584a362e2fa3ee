"""A scenario in an address, and back: a bundled name and what differs from it, as dotted keys.

``scenario=varlen-ring&mesh.ring=1`` is the same as ``--set mesh.ring=1`` on that file. Values are
YAML values, read by the reader that distrusts every scenario file. What else an address holds (the
step, the policy in the player, the theme) is the page's own and not read here.

>>> encode({"mesh": {"ring": 2}, "tokens": {"total": 48}})
'mesh.ring=2&tokens.total=48'
>>> decode("?mesh.ring=2&tokens.total=48&step=3")
{'mesh': {'ring': 2}, 'tokens': {'total': 48}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote

from usp_viz.errors import InvalidScenario
from usp_viz.loading import bundled, parse_mapping, parse_value, set_dotted
from usp_viz.scenario import Scenario

MAX_LENGTH = 200_000
OTHERS = ("step", "show", "tab", "present", "view")
"""What the page itself keeps in the address."""
_PARTS = ("mesh", "tensors", "tokens", "replicated", "attention", "run")
_SAFE = "[]{},:'\" -_.~/*"


def encode(written: Mapping[str, Any]) -> str:
    """The query of a scenario as written, without the question mark."""
    leaves = dict(_leaves(written))
    base = _base(written)
    if base:
        known = dict(_leaves(base))
        if known.keys() - {"expect"} <= leaves.keys():
            leaves = {**({"expect": None} if "expect" in known else {}), **leaves}
            leaves = {key: v for key, v in leaves.items() if key not in known or known[key] != v}
            leaves = {"scenario": written["name"], **leaves}
    return "&".join(f"{key}={_quoted(_text(value))}" for key, value in leaves.items())


def decode(query: str) -> dict[str, Any] | None:
    """The scenario that an address holds, as written and not validated; None if it holds none.

    Raises:
        InvalidScenario: It holds something else under those names.
    """
    if len(query) > MAX_LENGTH:
        limit = f"an address of at most {MAX_LENGTH:,} characters"
        raise InvalidScenario("address", len(query), limit)
    pairs = parse_qsl(query.lstrip("?#"), keep_blank_values=True, max_num_fields=500)
    sets = {key: value for key, value in pairs if _is_ours(key)}
    if not sets:
        return None
    name = sets.pop("scenario", None)
    base: dict[str, Any] = {}
    if name is not None:
        if name not in bundled():
            raise InvalidScenario("scenario", name, "no bundled scenario of this name")
        base = _bundled(name)
    found = set_dotted(base, {key: _value(key, text) for key, text in sets.items()})
    if found.get("expect", 0) is None:
        del found["expect"]
    return found


def _is_ours(key: str) -> bool:
    first = key.partition(".")[0]
    return key == "scenario" or first in Scenario.model_fields


def _value(key: str, text: str) -> Any:
    try:
        return parse_value(text)
    except InvalidScenario as error:
        raise InvalidScenario(key, text, error.limit) from None


def _base(written: Mapping[str, Any]) -> dict[str, Any] | None:
    name = written.get("name")
    return _bundled(name) if isinstance(name, str) and name in bundled() else None


def _bundled(name: str) -> dict[str, Any]:
    return parse_mapping(bundled()[name].read_text("utf-8"), name)


def _leaves(data: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; what is written inside a mask, a list of values or `expect` stays together."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value and key in _PARTS:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield above + key, value


def _text(value: Any) -> str:
    """As short as YAML reads it back."""
    if isinstance(value, str) and value == value.strip() and value.isprintable():
        try:
            if parse_value(value) == value:
                return value
        except InvalidScenario:
            pass
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _quoted(text: str) -> str:
    return quote(text, safe=_SAFE).replace(" ", "+")
