"""What people have in the clipboard, as a scenario: an error text, a launch command, a file.

An error is found by its text alone, also inside a traceback or a log; a launch command by its
flags, as ``--flag value`` or ``--flag=value``. Both may be in one paste. What a paste does not say
is taken from a bundled scenario, and the answer says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from usp_viz import rules
from usp_viz.errors import InvalidScenario
from usp_viz.loading import parse_mapping
from usp_viz.rule_table import RULES
from usp_viz.runtime.verify import check_limits
from usp_viz.scenario import RELEASES, Scenario
from usp_viz.ui import answers
from usp_viz.ui.shrink import shrink
from usp_viz.ui.writing import dump

MAX_PASTE = 200_000
MAX_DEGREE = 4096
BEGINNING = 8
"""Words of a message that are enough: people paste its first line."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "usp-varlen-ring": ("varlen-ring", {}),
    "usp-mask-ring": ("mask-ring", {}),
    "ulysses-ring": ("ulysses-ring", {}),
    "usp-varlen-mask": (
        "varlen-ring",
        {"mesh.ring": 1, "mesh.ulysses": 4, "attention.mask": {"key": {"valid": [43]}}},
    ),
    "usp-mask-4d": (
        "dense-2x2",
        {
            "mesh.ulysses": 4,
            "mesh.ring": 1,
            "attention.mask": {"dense": {"density": 0.5, "seed": 1}},
        },
    ),
    "usp-heads": ("dense-2x2", {"tensors.heads": 6, "mesh.ulysses": 4, "mesh.ring": 1}),
    "ulysses-heads": (
        "ulysses-ring",
        {"tensors.heads": 6, "mesh.ulysses": 4, "mesh.ring": 1},
    ),
    "usp-two-replicated": (
        "dense-2x2",
        {
            "mesh.ulysses": 4,
            "mesh.ring": 1,
            "tokens.replicated": {"prefix": 4, "suffix": 4, "kv_prefix": 0},
        },
    ),
    "usp-mask-replicated": (
        "dense-2x2",
        {
            "mesh.ulysses": 4,
            "mesh.ring": 1,
            "attention.mask": {"key": {"valid": [43]}},
            "tokens.replicated": {"prefix": 0, "suffix": 4, "kv_prefix": 0},
        },
    ),
    "ulysses-varlen-replicated": (
        "varlen-ring",
        {
            "attention.layer": "UlyssesAttention",
            "mesh.ring": 1,
            "mesh.ulysses": 4,
            "tokens.replicated": {"prefix": 4, "suffix": 0, "kv_prefix": 0},
        },
    ),
    "usp-replicated-ring": (
        "dense-2x2",
        {"release": "0.5.17", "tokens.replicated": {"prefix": 4, "suffix": 0, "kv_prefix": 0}},
    ),
    "usp-kv-prefix-ring": (
        "dense-2x2",
        {"release": "0.5.17", "tokens.replicated": {"prefix": 0, "suffix": 0, "kv_prefix": 4}},
    ),
}
"""A scenario that meets each rule whose error somebody may paste."""

FLAGS = {
    "num-gpus": "gpus",
    "ulysses-degree": "ulysses",
    "ring-degree": "ring",
    "sp-degree": "sp",
    "sp-size": "sp",
    "tp-size": "tp",
    "tensor-parallel-size": "tp",
    "attention-backend": "backend",
}
BACKENDS = {"fa": "FA", "fa3": "FA", "fa4": "FA", "flash": "FA", "torch_sdpa": "TORCH_SDPA"}
BACKENDS |= {"sdpa": "TORCH_SDPA", "sage_attn": "SAGE_ATTN", "sage": "SAGE_ATTN"}


@dataclass(frozen=True)
class Found:
    """What a paste means.

    Attributes:
        written: A scenario; None where the paste says none.
        said: What was found and what was assumed, a sentence each.
        choices: Other scenarios that it may mean: (title, scenario).
    """

    written: dict[str, Any] | None
    said: tuple[str, ...]
    choices: tuple[tuple[str, dict[str, Any]], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As the page takes it."""
        choices = [{"title": title, "text": dump(written)} for title, written in self.choices]
        text = None if self.written is None else dump(self.written)
        return {"text": text, "said": list(self.said), "choices": choices}


@dataclass
class Launch:
    """Degrees that a command asks for."""

    ulysses: int = 1
    ring: int = 1
    backend: str | None = None
    said: list[str] = field(default_factory=list[str])


def find(pasted: Any) -> str:
    """The scenario in a paste, as JSON text for the page."""

    def answer() -> dict[str, Any]:
        return recognise(str(pasted)[:MAX_PASTE]).to_json()

    found = answers.guarded(answer)
    if "said" not in found:
        found = {"text": None, "said": [found["error"]["message"]], "choices": []}
    return json.dumps(found)


def recognise(text: str) -> Found:
    """The scenario in a paste.

    Raises:
        InvalidScenario: Its flags contradict each other.
    """
    rule = error_in(text)
    launch = command_in(text)
    if rule is None and launch is None:
        return _file(text)
    said: list[str] = []
    if rule is not None:
        name, release = rule
        written = case(name)
        if rules.ending(Scenario.parse({**written, "release": release})) is not None:
            written["release"] = written["release"] if _meets(written, name) else release
        said.append(f"This is the rule {name}, {rules.about(name).cls}.")
        said.append(f"The picture is of {written['name']}, a small scenario that meets it.")
    else:
        written = case_of("dense-2x2")
    if launch is None:
        return Found(written, tuple(said))
    said += launch.said
    written = _on_mesh(written, launch)
    choices: list[tuple[str, dict[str, Any]]] = []
    if rule is None:
        written |= {"name": "launched", "title": _title(launch)}
        written["description"] = "The mesh of a launch command, with everything else plain."
        written["release"] = "0132848349"
        choices = list(_refusals(launch))
        if choices:
            said.append("Plain attention runs on this mesh. Which of these do your requests have?")
    return _fitted(written, said, choices)


# -- errors ------------------------------------------------------------------------------------


def error_in(text: str) -> tuple[str, str] | None:
    """(rule, a release that says so) of the error in a text; the three guards come first."""
    plain = " ".join(text.split())
    found = [(rule, release) for rule, release, pattern in _patterns() if pattern.search(plain)]
    return found[0] if found else None


@cache
def _patterns() -> tuple[tuple[str, str, re.Pattern[str]], ...]:
    """Each message of each rule with a case, its gaps open; the longest first, then beginnings."""
    made: dict[str, tuple[str, str, re.Pattern[str]]] = {}
    for rule in RULES:
        if rule.id in CASES:
            for release, text in rule.texts.items():
                words = text.split()
                for said in {" ".join(words), " ".join(words[:BEGINNING])}:
                    parts = map(re.escape, re.split(r"\{\w+\}", said))
                    pattern = re.compile(r".{1,80}?".join(parts))
                    made.setdefault(said, (rule.id, release, pattern))
    return tuple(made[text] for text in sorted(made, key=len, reverse=True))


def case(rule: str) -> dict[str, Any]:
    """A small scenario that meets a rule, as written."""
    name, sets = CASES[rule]
    written = case_of(name)
    if sets:
        made = Scenario.parse(written).set({**sets, **_even(written, sets)}).as_written()
        written = made | {"name": rule, "title": f"The rule {rule}", "description": ""}
        written.pop("expect", None)
        written["description"] = rules.about(rule).reason or "Found by its error text."
    return written


def _even(written: Mapping[str, Any], sets: Mapping[str, Any]) -> dict[str, Any]:
    """`dense-2x2` follows a release that has lost some rules; cases follow the commit."""
    return {} if "release" in sets else {"release": "0132848349"}


def case_of(name: str) -> dict[str, Any]:
    """A bundled scenario, as written."""
    return parse_mapping(answers.bundled_text(name), name)


def _meets(written: Mapping[str, Any], rule: str) -> bool:
    end = rules.ending(Scenario.parse(written))
    return end is not None and end.rule == rule


# -- launch commands -----------------------------------------------------------------------------


def command_in(text: str) -> Launch | None:
    """The degrees in a command line; None where it has none of its flags.

    Raises:
        InvalidScenario: A flag without a whole number, or degrees that do not go together.
    """
    given: dict[str, str] = {}
    for match in re.finditer(r"--([A-Za-z][\w-]*)(?:\s*=\s*|\s+)?([^\s\\]+)?", text):
        name = FLAGS.get(match[1].lower().replace("_", "-"))
        if name:
            given[name] = (match[2] or "").strip("'\",")
    numbers = {name: _degree(name, v) for name, v in given.items() if name != "backend"}
    if not {"gpus", "ulysses", "ring", "sp"} & numbers.keys():
        return None
    launch = Launch(backend=BACKENDS.get(given.get("backend", "").lower()))
    tp = numbers.get("tp", 1)
    sp = numbers.get("sp")
    if sp is None and "gpus" in numbers:
        sp = numbers["gpus"] // tp
    ulysses, ring = numbers.get("ulysses"), numbers.get("ring")
    if ulysses is None and ring is None:
        ulysses, ring = sp or 1, 1
        launch.said.append("Neither degree is given, so that all ranks form one Ulysses group.")
    elif ulysses is None:
        ulysses = max(1, (sp or ring or 1) // (ring or 1))
    elif ring is None:
        ring = max(1, (sp or ulysses) // ulysses)
    assert ulysses and ring
    launch.ulysses, launch.ring = ulysses, ring
    launch.said.insert(0, f"This launches U {ulysses} × R {ring} = {ulysses * ring} ranks.")
    if sp is not None and ulysses * ring != sp:
        launch.said.append(
            f"--ulysses-degree × --ring-degree is {ulysses * ring}, and there are {sp} ranks for "
            "sequence parallelism: sglang wants these to be equal."
        )
    return launch


def _degree(name: str, text: str) -> int:
    if not (re.fullmatch(r"[0-9]{1,6}", text) and 1 <= int(text) <= MAX_DEGREE):
        flag = next(flag for flag, known in FLAGS.items() if known == name)
        raise InvalidScenario(f"--{flag}", text, f"a whole number from 1 to {MAX_DEGREE}")
    return int(text)


def _title(launch: Launch) -> str:
    return f"Launched with --ulysses-degree {launch.ulysses} --ring-degree {launch.ring}"


def _on_mesh(written: Mapping[str, Any], launch: Launch) -> dict[str, Any]:
    """The scenario on another mesh, with as many rows and heads as that needs."""
    scenario = Scenario.parse(written)
    ranks, old = launch.ulysses * launch.ring, scenario.mesh.ranks
    sets: dict[str, Any] = {"mesh.ulysses": launch.ulysses, "mesh.ring": launch.ring}
    if launch.backend:
        sets["attention.sglang_backend"] = launch.backend
    if scenario.tensors.heads % launch.ulysses:
        sets["tensors.heads"] = -(-scenario.tensors.heads // launch.ulysses) * launch.ulysses
    shards = scenario.tokens.shards
    if isinstance(shards, tuple):
        again = [shards[p % old] for p in range(ranks)]
        sets |= {"tokens.shards": again, "tokens.total": sum(again)}
    elif scenario.tokens.total % (2 * ranks):
        sets["tokens.total"] = -(-scenario.tokens.total // (2 * ranks)) * 2 * ranks
    sets["expect"] = None
    made = scenario.set(sets).as_written()
    made.pop("expect", None)
    return made


def _refusals(launch: Launch) -> Iterator[tuple[str, dict[str, Any]]]:
    """The three refusals on this mesh, where it has a ring."""
    if launch.ring == 1:
        return
    titles = {
        "varlen-ring": "Uneven lengths (seq_lens)",
        "mask-ring": "Padding masks",
        "ulysses-ring": "UlyssesAttention layers",
    }
    for name, title in titles.items():
        fitted = _fitted(_on_mesh(case_of(name), launch), [], [])
        if fitted.written is not None:
            yield title, fitted.written


# -- files, and what is too large ------------------------------------------------------------------


def _file(text: str) -> Found:
    """A scenario in YAML or JSON, or nothing that is known."""
    try:
        written = parse_mapping(text, "paste")
        Scenario.parse(written)
    except InvalidScenario as error:
        hint = "Paste an error text, a launch command with --ring-degree, or a scenario file."
        known = any(f"{key}:" in text or f'"{key}"' in text for key in Scenario.model_fields)
        return Found(None, (str(error) if known else "Nothing here is known.", hint))
    return _fitted(written, ["This is a scenario file."], [])


def _fitted(
    written: Mapping[str, Any], said: list[str], choices: list[tuple[str, dict[str, Any]]]
) -> Found:
    """Small enough to run here, and what that took."""
    scenario = Scenario.parse(written)
    small = shrink(scenario, _fits)
    if small is None:
        said = [*said, "It is too large to run here, and no smaller one ends in the same way."]
        return Found(dict(written), tuple(said), tuple(choices))
    if not small.said:
        return Found(dict(written), tuple(said), tuple(choices))
    made = small.scenario.as_written()
    made.pop("expect", None)
    shrunk = (
        f"Too large to run here, so shrunk to what meets the same rules: {', '.join(small.said)}."
    )
    return Found(made, (*said, shrunk), tuple(choices))


def _fits(scenario: Scenario) -> bool:
    try:
        check_limits(scenario)
    except InvalidScenario:
        return False
    return True


__all__ = ["RELEASES", "Found", "find", "recognise"]
