"""From a file, standard input or a bundled name to plain data, distrusting every byte of it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from usp_viz.errors import InvalidScenario, shorten
from usp_viz.scenario_errors import closest

MAX_BYTES = 1_000_000
MAX_NODES = 200_000
MAX_DEPTH = 32
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
        raise InvalidScenario("", None, f"{source}: over {MAX_BYTES:,} characters")
    try:
        data = _parse(text)
    except InvalidScenario as error:
        raise InvalidScenario("", None, f"{source}: {error.limit}") from None
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise InvalidScenario(
            "", None, f"{source}: a scenario is a mapping of keys; this is {kind}"
        )
    return data


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
            below = node.get(parent, {})
            if not isinstance(below, dict):
                limit = f"{parent} is {shorten(below)}, not a mapping: set {parent} itself"
                raise InvalidScenario(dotted, value, limit)
            node[parent] = node = dict(below)  # type: ignore[reportUnknownArgumentType]
        node[last] = value
    return result


def parse_sets(pairs: Iterable[str]) -> dict[str, Any]:
    """``["mesh.ring=2", …]`` as dotted keys and YAML values."""
    sets: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", key.strip()):
            raise InvalidScenario("--set", pair, "expected key=value, e.g. mesh.ring=2")
        sets[key.strip()] = parse_value(value)
    return sets


def _read(source: str) -> str:
    if source == "-":
        raw = sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        raw = _read_file(source)
    if len(raw) > MAX_BYTES:
        raise InvalidScenario("", None, f"{source}: over {MAX_BYTES:,} bytes; a scenario is small")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidScenario("", None, f"{source}: not UTF-8 text") from None
    if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text):
        raise InvalidScenario("", None, f"{source}: holds control characters; is it binary?")
    return text


def _read_file(source: str) -> bytes:
    path = Path(source)
    try:
        if path.is_file():
            with path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
        looks_like_path = "/" in source or path.suffix in (".yaml", ".yml", ".json")
        if path.is_dir() and (looks_like_path or source not in bundled()):
            raise InvalidScenario("", None, f"{source}: a directory, not a scenario file")
        if path.exists() and not path.is_dir():
            raise InvalidScenario("", None, f"{source}: not a regular file")
    except (OSError, ValueError) as error:  # no permission, name too long, a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InvalidScenario("", None, f"{shorten(source)}: {reason}") from None
    names = bundled()
    if source in names:
        return names[source].read_bytes()
    guess = closest(source, list(names))
    limit = (
        f"{shorten(source)}: no such file, nor a bundled scenario (usp-viz scenarios lists them)"
    )
    raise InvalidScenario("", None, limit, guess)


def _parse(text: str) -> Any:
    try:
        if text.lstrip().startswith(("{", "[")):
            try:
                return _bounded(json.loads(text, object_pairs_hook=_unique))
            except json.JSONDecodeError:
                pass  # YAML's flow style opens the same way
        return _bounded(_parse_yaml(text))
    except RecursionError:
        raise InvalidScenario("", None, "nested too deeply") from None


def _parse_yaml(text: str) -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):
        """Safe YAML without aliases (which can expand without bound) or repeated keys."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise InvalidScenario("", None, "YAML aliases (*name) are not accepted")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            pairs = [(self.construct_object(k, deep=True), v) for k, v in node.value]
            return _unique([(k, self.construct_object(v, deep=True)) for k, v in pairs])

    # A mapping with a merge key or a timestamp is legal YAML and never a legal scenario.
    Loader.add_constructor("tag:yaml.org,2002:map", lambda l, n: l.construct_mapping(n))  # type: ignore[reportUnknownLambdaType]
    try:
        depth = 0
        for event in yaml.parse(text, Loader=base):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise InvalidScenario("", None, "nested too deeply")
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InvalidScenario("", None, f"not YAML or JSON: {problem}{where}") from None
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, InvalidScenario):
            raise
        raise InvalidScenario("", None, f"not YAML or JSON: {shorten(str(error))}") from None


def _unique(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise InvalidScenario("", None, f"keys are words; this one is {shorten(key)}")
        if key in result:
            raise InvalidScenario("", None, f"the key {shorten(key)} stands there twice")
        result[key] = value
    return result


def _bounded(data: Any) -> Any:
    """`data`, unless it holds more values or depth than any scenario could."""
    count, level = 0, [data]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        count += len(level)
        if not level:
            return data
        if count > MAX_NODES:
            raise InvalidScenario("", None, f"over {MAX_NODES:,} values")
    raise InvalidScenario("", None, "nested too deeply")
