"""A scenario as YAML text, and where in such a text a key stands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from usp_viz.errors import InvalidScenario
from usp_viz.loading import parse_mapping

_LINE = re.compile(r"\bline (\d+)(?:, column (\d+))?")


def dump(written: Mapping[str, Any]) -> str:
    """YAML like that of the bundled files: a line for each part."""
    text = yaml.safe_dump(
        dict(written), sort_keys=False, allow_unicode=True, default_flow_style=None, width=96
    )
    try:
        if parse_mapping(text) == written:
            return text
    except InvalidScenario:
        pass
    return json.dumps(written, indent=2, ensure_ascii=False) + "\n"  # YAML 1.1 read it otherwise


def line_of(text: str, error: InvalidScenario) -> int | None:
    """The line, from 1, that an error is about; None where it is about no single one."""
    found = _LINE.search(error.limit)
    if found:
        return int(found[1])
    if not error.key:
        return None
    try:
        node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    line = None
    for part in re.split(r"[.\[\]]+", error.key):
        child = _below(node, part)
        if child is None:
            break
        key, node = child
        line = key.start_mark.line + 1
    return line


def _below(node: Any, part: str) -> tuple[Any, Any] | None:
    """The key and the value called `part` in a YAML node."""
    if isinstance(node, yaml.MappingNode):
        return next((pair for pair in node.value if pair[0].value == part), None)
    if isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
        return node.value[int(part)], node.value[int(part)]
    return None
