"""From a file, standard input or a bundled name to plain data, distrusting every byte of it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from usp_viz.errors import InvalidScenario, shorten
from usp_viz.scenario_errors import closest

MAX_BYTES = 1_000_000
MAX_NODES = 100_000
MAX_DEPTH = 32
MAX_DIGITS = 100
SCENARIOS = Path(__file__).parent / "assets" / "scenarios"


def bundled() -> dict[str, Path]:
    """Bundled scenarios by name, in reading order."""
    return {path.stem: path for path in sorted(SCENARIOS.glob("*.yaml"))}


def read_mapping(source: str) -> dict[str, Any]:
    """The mapping in `source`: a path, ``-`` for standard input, or a bundled scenario's name.

    Raises:
        InvalidScenario: No such file, not a regular file, over a megabyte, binary, not YAML or
            JSON, not a mapping.
    """
    return parse_mapping(_read(source), source)


def parse_mapping(text: str, source: str = "text") -> dict[str, Any]:
    """YAML or JSON text as a mapping. Aliases, tags and repeated keys are refused."""
    if len(text) > MAX_BYTES:
        raise _refused(source, f"over {MAX_BYTES:,} characters")
    try:
        data = _parse(text)
    except InvalidScenario as error:
        raise _refused(source, error.limit) from None
    if data is None:
        raise _refused(source, "empty; a scenario is a mapping of keys, such as mesh: {ring: 2}")
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else f"only {shorten(data)}"
        raise _refused(source, f"a scenario is a mapping of keys; this is {kind}")
    return cast("dict[str, Any]", data)


def parse_value(text: str) -> Any:
    """One YAML value, as in ``--set key=value``."""
    if len(text) > MAX_BYTES:
        raise InvalidScenario("", None, f"value over {MAX_BYTES:,} characters")
    return _parse(text)


def set_dotted(data: Mapping[str, Any], sets: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `data` with dotted keys replaced: ``{"mesh.ring": 2}``."""
    result: dict[str, Any] = dict(data)
    for dotted, value in sets.items():
        node = result
        *parents, last = dotted.split(".")
        if not last or not all(parents):
            raise InvalidScenario(dotted, value, "keys are dotted names, e.g. mesh.ring=2")
        for parent in parents:
            below: Any = node.get(parent, {})
            if not isinstance(below, dict):
                limit = f"{parent} is {shorten(below)}, not a mapping: set {parent} itself"
                raise InvalidScenario(dotted, value, limit)
            node[parent] = node = dict(cast("dict[str, Any]", below))
        node[last] = value
    return result


def parse_sets(pairs: Iterable[str]) -> dict[str, Any]:
    """``["mesh.ring=2", …]`` as dotted keys and YAML values."""
    sets: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", key.strip()):
            limit = "expected a dotted key and a value, e.g. mesh.ring=2"
            raise InvalidScenario("--set", pair, limit)
        try:
            sets[key.strip()] = parse_value(value)
        except InvalidScenario as error:
            raise InvalidScenario(f"--set {key.strip()}", value, error.limit) from None
    return sets


def _read(source: str) -> str:
    if source == "-":
        raw = sys.stdin.buffer.read(MAX_BYTES + 1) if sys.stdin else b""
    else:
        raw = _read_file(source)
    if len(raw) > MAX_BYTES:
        raise _refused(source, f"over {MAX_BYTES:,} bytes; a scenario is small")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _refused(source, "not UTF-8 text") from None
    if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text):
        raise _refused(source, "holds control characters; is it binary?")
    return text


def _read_file(source: str) -> bytes:
    path, names = Path(source), bundled()
    try:
        if path.is_file():
            # A file of the kernel's may block for ever: then say that there is nothing to read.
            with open(path, "rb", opener=_without_waiting) as file:
                return file.read(MAX_BYTES + 1) or b""
        if source in names:
            return names[source].read_bytes()
        if source and path.is_dir():
            raise _refused(source, "a directory, not a scenario file")
        if source and path.exists():
            raise _refused(source, "not a regular file; for a pipe, use - (standard input)")
    except OSError as error:  # no permission, name too long
        raise _refused(source, error.strerror or str(error)) from None
    except ValueError as error:
        if isinstance(error, InvalidScenario):
            raise
        raise _refused(source, str(error)) from None  # a NUL in the name
    limit = "no such file, nor a bundled scenario (usp-viz scenarios lists them)"
    raise _refused(source, limit, closest(source, list(names)))


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _refused(source: str, limit: str, nearest: Iterable[str] = ()) -> InvalidScenario:
    shown = source if re.fullmatch(r"[\w./~ -]{1,200}", source) else shorten(source, 200)
    return InvalidScenario("", None, f"{shown}: {limit}", tuple(nearest))


def _parse(text: str) -> Any:
    if text.lstrip().startswith(("{", "[", '"')):
        try:
            return _bounded(json.loads(text, object_pairs_hook=_mapping, parse_int=_integer))
        except json.JSONDecodeError:
            pass  # YAML's flow style and quotes open the same way
        except RecursionError:
            raise InvalidScenario("", None, "nested too deeply") from None
    return _parse_yaml(text)


def _bounded(data: Any) -> Any:
    """`data`, unless it holds more values or depth than any scenario could."""
    count = 0
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH + 1):
        level = [child for item in level for child in _children(item)]
        count += len(level)
        if not level:
            return data
        if count > MAX_NODES:
            raise InvalidScenario("", None, f"over {MAX_NODES:,} values")
    raise InvalidScenario("", None, "nested too deeply")


def _children(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return cast("dict[str, Any]", item).values()
    return cast("list[Any]", item) if isinstance(item, list) else ()


def _parse_yaml(text: str) -> Any:
    """YAML's structure with JSON's values; what else YAML can do is refused as it is met.

    Aliases can expand without bound, tags can name types, and YAML 1.1 reads ``1:30`` as 90 and
    ``010`` as 8. Reading events rather than objects leaves all that out, needs no recursion, and
    stops at the first value too many.
    """
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _build(yaml.parse(text, Loader=loader))
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        if mark and text[mark.index : mark.index + 1] == "\t":
            problem = "a tab, where only spaces indent"
        raise InvalidScenario("", None, f"not YAML or JSON: {problem}{where}") from None


def _build(events: Iterable[Any]) -> Any:
    """The value that YAML events describe; None of an empty document."""
    import yaml

    open_nodes: list[list[Any]] = [[]]
    count, documents = 0, 0
    for event in events:
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise _at(event, "a second document; one file is one scenario")
        if isinstance(event, yaml.AliasEvent):
            raise _at(event, "YAML aliases (*name) are not accepted")
        if isinstance(event, yaml.NodeEvent):
            if getattr(event, "tag", None) is not None:
                raise _at(event, "YAML tags (!name) are not accepted")
            count += 1
            if count > MAX_NODES:
                raise InvalidScenario("", None, f"over {MAX_NODES:,} values")
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append([])
            if len(open_nodes) > MAX_DEPTH + 1:
                raise InvalidScenario("", None, "nested too deeply")
        elif isinstance(event, yaml.ScalarEvent):
            open_nodes[-1].append(_plain(event.value) if event.implicit[0] else event.value)
        elif isinstance(event, yaml.CollectionEndEvent):
            items = open_nodes.pop()
            if isinstance(event, yaml.MappingEndEvent):
                items = _mapping(list(zip(items[::2], items[1::2], strict=True)))
            open_nodes[-1].append(items)
    return open_nodes[0][0] if open_nodes[0] else None


def _at(event: Any, problem: str) -> InvalidScenario:
    return InvalidScenario("", None, f"line {event.start_mark.line + 1}: {problem}")


_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_DECIMAL = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_ENDLESS = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def _plain(text: str) -> Any:
    """A scalar without quotes: null, a boolean, a number, or text. Version numbers stay text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _DECIMAL.fullmatch(text) and not re.match(r"[-+]?0[0-9]", text):
        return float(text)
    if _ENDLESS.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:  # beyond any field, and slow to convert
        raise InvalidScenario("", None, f"a number of {len(text):,} digits; {MAX_DIGITS} is most")
    return int(text)


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise InvalidScenario("", None, f"keys are words; this one is {shorten(key)}")
        if key in result:
            raise InvalidScenario("", None, f"the key {shorten(key)} stands there twice")
        result[key] = value
    return result
