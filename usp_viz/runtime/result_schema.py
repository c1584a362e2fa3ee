"""The published JSON Schema of a result: what `Run.to_json` and `invalid_json` make.

Written by hand, as the contract is: a field that is added to a result is described here, and the
tests hold real results against this with every undescribed key forbidden.
"""

from __future__ import annotations

from typing import Any, get_args

from usp_viz.runtime.result import RESULT_VERSION, Outcome
from usp_viz.scenario import POLICIES

_Schema = dict[str, Any]

_TEXT: _Schema = {"type": "string"}
_NATURAL: _Schema = {"type": "integer", "minimum": 0}
_NUMBER: _Schema = {
    "description": "NaN and the infinities are strings: JSON has no token for them.",
    "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}],
}
_HASH: _Schema = {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}
_MS: _Schema = {"type": ["number", "null"], "minimum": 0}


def result_schema() -> _Schema:
    """The published JSON Schema of one result."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Result",
        "description": "One scenario under one policy; `usp-viz run --json` prints one a line.",
        "oneOf": [_ran(), _not_run()],
    }


def _ran() -> _Schema:
    outcomes = [outcome for outcome in get_args(Outcome) if outcome != "invalid"]
    return _object(
        "It was run on ranks.",
        result_version={"const": RESULT_VERSION},
        scenario={"type": "object", "description": "Normalised, as in the scenario's schema."},
        scenario_hash=_HASH,
        policy={"enum": list(POLICIES)},
        release=_TEXT,
        engine=_TEXT,
        backend=_TEXT,
        device=_TEXT,
        world=_at_least_one("Ranks."),
        outcome={"enum": outcomes},
        error=_or_null(_problem()),
        warnings=_warnings(),
        accuracy=_or_null(_accuracy()),
        pairs=_or_null(
            _object(
                "(scored query row, key row) pairs over batch rows and query heads.",
                **dict.fromkeys(
                    ("allowed", "computed_once", "missing", "repeated", "forbidden"), _NATURAL
                ),
            )
        ),
        trace=_object(
            "What the ranks recorded, as far as they got.",
            events=_NATURAL,
            hash=_HASH,
            matches_prediction={"type": "boolean"},
            bytes_sent_per_rank=_list(_NATURAL),
            collectives=_list(_TEXT),
        ),
        timing=_object(
            "Milliseconds; cold_start_ms is null when the ranks stood ready.",
            **dict.fromkeys(("wall_ms", "attention_ms", "cold_start_ms"), _MS),
        ),
        versions={"type": "object", "additionalProperties": _TEXT},
    )


def _not_run() -> _Schema:
    return _object(
        "It did not get as far as the ranks: it is invalid, over a cap, or needs something that "
        "this machine lacks; or the server that was asked failed or stopped (crashed).",
        result_version={"const": RESULT_VERSION},
        scenario={"type": ["object", "null"], "description": "Null where it is no scenario."},
        scenario_hash=_or_null(_HASH),
        outcome={"enum": ["invalid", "crashed"]},
        error=_object(
            "Which key, its value, the limit, and what is legal nearby.",
            **{"class": _TEXT},
            message=_TEXT,
            key=_TEXT,
            value={"type": ["string", "number", "boolean", "null"]},
            limit=_TEXT,
            nearest={"type": "array"},
        ),
        warnings=_warnings(),
    )


def _problem() -> _Schema:
    fix = _object(
        "A change that makes a valid scenario which no longer meets this refusal.",
        id=_TEXT,
        title=_TEXT,
        set={"type": "object", "description": "Dotted keys and values."},
    )
    where = _object(
        "How one rank ended, and what it was doing.",
        rank=_NATURAL,
        status={"enum": ["ok", "raised", "died", "hung", "cancelled"]},
        step=_or_null(_NATURAL),
        stage=_TEXT,
        op=_TEXT,
        message=_TEXT,
    )
    return _object(
        "The exception, word for word, and what the rule behind it says.",
        optional={
            "release": _TEXT,
            "source": _TEXT,
            "because": _list(_TEXT),
            "fixes": _list(fix),
            "where": _list(where),
        },
        **{"class": _TEXT},
        message=_TEXT,
        rule=_or_null(_TEXT),
        ranks=_list(_NATURAL),
    )


def _accuracy() -> _Schema:
    rank = _object(
        "One rank's scored rows.",
        rank=_NATURAL,
        rows=_NATURAL,
        wrong_rows=_NATURAL,
        max_abs=_NUMBER,
    )
    return _object(
        "Against the float64 reference, over scored rows.",
        max_abs=_NUMBER,
        rel_l2=_NUMBER,
        tolerance=_NUMBER,
        rows=_NATURAL,
        wrong_rows=_NATURAL,
        per_rank=_list(rank),
    )


def _warnings() -> _Schema:
    return _list(_object("A known silent trap.", id=_TEXT, text=_TEXT))


def _object(description: str, *, optional: _Schema | None = None, **properties: _Schema) -> _Schema:
    """An object whose `properties` are all there, and whose `optional` ones may be."""
    return {
        "description": description,
        "type": "object",
        "required": list(properties),
        "properties": properties | (optional or {}),
    }


def _list(items: _Schema) -> _Schema:
    return {"type": "array", "items": items}


def _or_null(schema: _Schema) -> _Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _at_least_one(description: str) -> _Schema:
    return {"description": description, "type": "integer", "minimum": 1}
