"""The published JSON Schema of a trace."""

from __future__ import annotations

from typing import Any

from usp_viz.trace import OPS, TENSORS, TRACE_VERSION


def trace_schema() -> dict[str, Any]:
    """The published JSON Schema of `Trace.to_json`."""
    natural = {"type": "integer", "minimum": 0}
    span = {"type": "array", "prefixItems": [natural, natural], "minItems": 2, "maxItems": 2}
    spans = {"type": "array", "items": span}
    fields: dict[str, Any] = {
        "step": natural,
        "stage": {"type": "string"},
        "op": {"enum": list(OPS)},
        "src": natural,
        "dst": natural,
        "tensor": {"enum": list(TENSORS)},
        "rows": spans,
        "heads": span,
        "bytes": natural,
    }
    parts = ("kv_prefix", "prefix", "rows", "suffix")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Trace",
        "description": "What happens on the ranks; rows are half-open spans of whole-order ids.",
        "type": "object",
        "required": ["trace_version", "ranks", "stages", "events", "hash"],
        "properties": {
            "trace_version": {"const": TRACE_VERSION},
            "ranks": {"type": "integer", "minimum": 1},
            "order": {
                "type": "object",
                "required": list(parts),
                "properties": dict.fromkeys(parts, span),
            },
            "stages": {"type": "array", "items": {"type": "string"}},
            "events": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": list(fields),
                    "properties": fields | {"keys": spans, "pairs": natural},
                },
            },
            "hash": {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
        },
    }
