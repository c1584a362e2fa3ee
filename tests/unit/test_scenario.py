"""What a scenario may say, what it says when it may not, and that it means the same everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import mappings, scenarios
from usp_viz.errors import InvalidScenario
from usp_viz.loading import parse_mapping, parse_sets, set_dotted
from usp_viz.scenario import RELEASES, Scenario

INT = "expected an integer"
MAPPING = "expected a mapping with"
MASKS = "key, tail_pad, gap_pad, window, prefix_lm, dense"


def refusal(mapping: Any) -> InvalidScenario:
    """The error, after looking at what every error must be."""
    with pytest.raises(InvalidScenario) as caught:
        Scenario.parse(mapping)
    error = caught.value
    assert error.key, "names no key"
    assert str(error).isprintable(), "would break the line or steer a terminal"
    assert len(str(error)) < 400
    assert error.key in str(error) or "…" in str(error)
    json.dumps(error.as_json(), allow_nan=False).encode()
    return error


# (as written, key at fault, what the message says, nearest legal values)
WRONG = [
    # wrong types
    ("mesh: {ulysses: two}", "mesh.ulysses", f"{INT}, got text", []),
    ("mesh: {ulysses: '2'}", "mesh.ulysses", f"{INT}, got text", [2]),
    ("mesh: {ulysses: 2.0}", "mesh.ulysses", f"{INT}, got a decimal number", [2]),
    ("mesh: {ulysses: 2.5}", "mesh.ulysses", f"{INT}, got a decimal number", []),
    ("mesh: {ulysses: true}", "mesh.ulysses", f"{INT}, got a boolean", []),
    ("mesh: {ulysses: null}", "mesh.ulysses", f"{INT}, got null", []),
    ("mesh: {ulysses: .nan}", "mesh.ulysses", INT, []),
    ("mesh: {ulysses: [2]}", "mesh.ulysses", f"{INT}, got a list", []),
    ("mesh: 3", "mesh", f"{MAPPING} order, ring, ulysses; got an integer", []),
    ("mesh: []", "mesh", f"{MAPPING} order, ring, ulysses; got a list", []),
    ("mesh:", "mesh", f"{MAPPING} order, ring, ulysses; got null", []),
    ("tokens: {total: 1e3}", "tokens.total", INT, [1000]),
    ("tokens: {total: 12_000}", "tokens.total", f"{INT}, got text", []),
    ("tokens: {total: 1:20}", "tokens.total", f"{INT}, got text", []),
    ("tokens: {total: 010}", "tokens.total", f"{INT}, got text", [10]),
    ("tokens: {shards: [a]}", "tokens.shards[0]", f"{INT}, got text", []),
    ("tokens: {shards: [true]}", "tokens.shards[0]", f"{INT}, got a boolean", []),
    ("tokens: {shards: 12}", "tokens.shards", "one of even, auto, or a list of rows", []),
    ("tokens: {shards: {a: 1}}", "tokens.shards", "one of even, auto, or a list of rows", []),
    ("tokens: {documents: 4}", "tokens.documents", "expected a list, such as [4]", []),
    ("attention: {causal: 1}", "attention.causal", "expected true or false, got an", [True]),
    ("attention: {causal: 'no'}", "attention.causal", "expected true or false, got text", [False]),
    ("attention: {causal: yes}", "attention.causal", "expected true or false, got text", [True]),
    ("attention: {causal: perhaps}", "attention.causal", "expected true or false", []),
    ("title: 3", "title", "expected text (in quotes), got an integer", []),
    ("name: no", "name", None, None),  # plain `no` is text, and a legal name
    ("run: {timeout_s: '60'}", "run.timeout_s", "expected a number, got text", [60.0]),
    ("run: {timeout_s: true}", "run.timeout_s", "expected a number, got a boolean", []),
    ("expect: verified", "expect", f"{MAPPING} error, outcome; got text", []),
    ("fault: late", "fault", "no named mistakes are built yet", []),
    # numbers out of range
    ("mesh: {ulysses: 0}", "mesh.ulysses", "must be >= 1", [1]),
    ("mesh: {ring: -1}", "mesh.ring", "must be >= 1", [1]),
    ("mesh: {ulysses: 99999999999999999999999}", "mesh.ulysses", "must be <= 4096", [4096]),
    ("mesh: {ulysses: 64, ring: 65}", "mesh.ring", "at most 4096 ranks in all", [64]),
    ("tokens: {total: 0}", "tokens.total", "must be >= 1", [1]),
    ("tokens: {total: 999999999999}", "tokens.total", "must be <= 4194304", [4194304]),
    ("tensors: {head_dim: 1025}", "tensors.head_dim", "must be <= 1024", [1024]),
    ("run: {timeout_s: 0}", "run.timeout_s", "must be > 0", []),
    ("run: {timeout_s: .inf}", "run.timeout_s", "must be <= 3600", [3600.0]),
    ("run: {timeout_s: .nan}", "run.timeout_s", "expected a finite number", []),
    ("run: {seed: -1}", "run.seed", "must be >= 0", [0]),
    ("schema_version: 2", "schema_version", "reads schema_version 1", [1]),
    ("schema_version: true", "schema_version", "reads schema_version 1", [1]),
    # words
    ("mesh: {order: ulysses}", "mesh.order", "one of ulysses-inner, ring-inner", ["ulysses-inner"]),
    ("mesh: {order: [1]}", "mesh.order", "one of ulysses-inner, ring-inner", []),
    ("tensors: {dtype: fp32}", "tensors.dtype", "one of float64, float32, ", ["float32"]),
    ("tensors: {values: nromal}", "tensors.values", "one of normal, constant, ", ["normal"]),
    ("tensors: {values: [1, 2]}", "tensors.values", "or {list: [a number for each row]}", []),
    ("tensors: {values: null}", "tensors.values", "one of normal", []),
    ("tokens: {shards: evn}", "tokens.shards", "one of even, auto", ["even"]),
    ("tokens: {layout: zig-zag}", "tokens.layout", "one of contiguous, zigzag", ["zigzag"]),
    ("policy: SGLANG", "policy", "one of sglang, unguarded, extended", ["sglang"]),
    ("policy: [sglang]", "policy", "one of sglang, unguarded, extended", []),
    ("policy: all", "policy", "one of sglang, unguarded, extended", []),
    ("release: 0.5.24", "release", "one of 0.5.16, ", ["0.5.23", "0.5.22", "0.5.21"]),
    ("release: 132848349", "release", "one of 0.5.16, ", ["0132848349"]),
    ("attention: {sglang_backend: fa}", "attention.sglang_backend", "one of FA", ["FA"]),
    ("attention: {seq_lens: often}", "attention.seq_lens", "or a list of lengths", []),
    ("engine: builtn", "engine", "one of builtin, sglang, ", ["builtin"]),
    ("engine: os:system", "engine", "a scenario names an engine, never code to load", ["builtin"]),
    (
        "engine: ./evil.py:run",
        "engine",
        "a scenario names an engine, never code to load",
        ["builtin"],
    ),
    ("engine: evil.py", "engine", "one of builtin", None),
    ("name: Foo Bar", "name", "lower-case letters, digits", ["foo-bar"]),
    ("name: ''", "name", "lower-case letters, digits", []),
    ("name: ../../etc", "name", "lower-case letters, digits", ["etc"]),
    ("expect: {outcome: ok}", "expect.outcome", "one of verified, wrong, refused", []),
    # keys
    ("mesh: {ulyses: 2}", "mesh.ulyses", "known here: order, ring, ulysses", ["ulysses"]),
    ("meesh: {ring: 2}", "meesh", "unknown key; known here: attention, ", ["mesh"]),
    ("Mesh: {ring: 2}", "Mesh", "unknown key", ["mesh"]),
    ("ring: 2", "ring", "unknown key", ["mesh.ring"]),
    ("tokens: {causal: true}", "tokens.causal", "unknown key", ["attention.causal"]),
    ("tokens.total: 4", "'tokens.total'", "dotted keys are for --set", []),
    ("'': 3", "''", "unknown key", []),
    ("'<list>': 3", "'<list>'", "unknown key", []),
    ("expect: {error: x}", "expect.outcome", "required, and not given", []),
    ("tensors: {values: {lst: [1]}}", "tensors.values.lst", "unknown key", ["list"]),
    ("tensors: {values: {}}", "tensors.values.list", "required, and not given", []),
    ("attention: {masks: none}", "attention.masks", "unknown key", ["mask"]),
    # sums and divisibility
    ("tokens: {total: 7}\nmesh: {ring: 2}", "tokens.total", "7 % 2 = 1; use shards: auto", [6, 8]),
    ("tokens: {total: 3}\nmesh: {ring: 8}", "tokens.total", "3 % 8 = 3", [8]),
    ("tensors: {heads: 8, kv_heads: 3}", "tensors.kv_heads", "divide the 8 query heads", [2, 4]),
    ("tensors: {heads: 8, kv_heads: 16}", "tensors.kv_heads", "divide the 8 query heads", [8]),
    ("tokens: {shards: [40, 9]}\nmesh: {ring: 2}", "tokens.shards", "to 49", [[40, 8]]),
    ("tokens: {shards: [50, 9]}\nmesh: {ring: 2}", "tokens.shards", "to 59", [[48, 0]]),
    ("tokens: {shards: [40, 8]}", "tokens.shards", "P = U·R = 1, and has 2", ["auto"]),
    ("tokens: {shards: [50, -2]}\nmesh: {ring: 2}", "tokens.shards[1]", "must be >= 0", [0]),
    ("tokens: {documents: [20, 20]}", "tokens.documents", "to 40", [[20, 28]]),
    ("tokens: {documents: [60, 3]}", "tokens.documents", "to 63", [[48, 0]]),
    ("tokens: {documents: []}", "tokens.documents", "at least 1 item", []),
    ("tokens: {layout: striped, shards: auto}", "tokens.shards", "needs shards: even", ["even"]),
    ("tokens: {layout: zigzag, shards: [48]}", "tokens.shards", "needs shards: even", ["even"]),
    ("tokens: {layout: zigzag, total: 12}\nmesh: {ring: 4}", "tokens.total", "% 8 == 0", [8, 16]),
    ("tensors: {values: {list: [1, 2]}}", "tensors.values.list", "each of the 48 rows", [48]),
    ("tensors: {values: {list: [.nan]}}", "tensors.values.list[0]", "a finite number", []),
    # masks
    (
        "attention: {mask: nne}",
        "attention.mask",
        f"none, or a mapping with one of {MASKS}",
        ["none"],
    ),
    ("attention: {mask: key}", "attention.mask", "none, or a mapping with one of", []),
    ("attention: {mask: {}}", "attention.mask", "none, or a mapping with one of", []),
    ("attention: {mask: 3}", "attention.mask", "none, or a mapping with one of", []),
    ("attention: {mask: [[]]}", "attention.mask", "none, or a mapping with one of", []),
    ("attention: {mask: {keey: {valid: [4]}}}", "attention.mask.keey", MASKS, ["key"]),
    (
        "attention: {mask: [{dense: {}}, {windw: {}}]}",
        "attention.mask[1].windw",
        "no such mask",
        ["window"],
    ),
    (
        "attention: {mask: {key: {valid: [4]}, window: {left: 3}}}",
        "attention.mask.window",
        "write a list: [{key: …}, {window: …}]",
        [],
    ),
    ("attention: {mask: {key: {valid: 4}}}", "attention.mask.key.valid", "such as [4]", []),
    ("attention: {mask: {key: [4]}}", "attention.mask.key", f"{MAPPING} holes, valid", []),
    ("attention: {mask: {key: {}}}", "attention.mask.key.valid", "required", []),
    ("attention: {mask: {key: {vald: [4]}}}", "attention.mask.key.vald", "unknown", ["valid"]),
    ("attention: {mask: {key: {valid: [1, 2]}}}", "attention.mask.key.valid", "one length", [[1]]),
    ("attention: {mask: {key: {valid: [49]}}}", "attention.mask.key.valid", "at most S = 48", [48]),
    ("attention: {mask: {tail_pad: 43}}", "attention.mask.tail_pad", f"{MAPPING} start; got", []),
    ("attention: {mask: {tail_pad: {start: 49}}}", "attention.mask.tail_pad.start", "S = 48", [48]),
    (
        "attention: {mask: {gap_pad: {start: 9, end: 3}}}",
        "attention.mask.gap_pad",
        "start <= end <= S = 48",
        [{"start": 9, "end": 9}],
    ),
    ("attention: {mask: {window: {left: -1}}}", "attention.mask.window.left", "must be >= 0", [0]),
    ("attention: {mask: {prefix_lm: {prefix: 49}}}", "attention.mask.prefix_lm.prefix", "S", [48]),
    ("attention: {mask: {dense: {density: 2}}}", "attention.mask.dense.density", "<= 1", [1.0]),
    ("attention: {mask: {dense: {density: .nan}}}", "attention.mask.dense.density", "finite", []),
    *(
        (f"attention: {{mask: {{key: {{valid: [4], holes: {holes}}}}}}}", *rest)
        for holes, *rest in [
            ("[[1, 3], [2, 4]]", "attention.mask.key.holes", "overlaps the hole before it", []),
            ("[[2, 4], [1, 3]]", "attention.mask.key.holes", "overlaps the hole before it", []),
            ("[[3, 1]]", "attention.mask.key.holes", "half-open [a, b) with a < b <= S = 48", []),
            ("[[3, 3]]", "attention.mask.key.holes", "half-open", []),
            ("[[47, 50]]", "attention.mask.key.holes", "half-open", []),
            ("[1, 3]", "attention.mask.key.holes", "holes are pairs [start, end)", []),
            ("[[3]]", "attention.mask.key.holes", "holes are pairs [start, end)", []),
            ("[[1, 2, 3]]", "attention.mask.key.holes", "holes are pairs [start, end)", []),
        ]
    ),
]


@pytest.mark.parametrize(("text", "key", "says", "nearest"), WRONG, ids=[w[0] for w in WRONG])
def test_what_is_wrong_is_said(text: str, key: str, says: str | None, nearest: Any) -> None:
    if says is None:
        Scenario.parse(parse_mapping(text))
        return
    error = refusal(parse_mapping(text))
    assert error.key == key
    assert says in str(error)
    assert nearest is None or list(error.nearest) == nearest


MENDED = [w for w in WRONG if w[3] and len(w[3]) == 1 and "[" not in w[1]]


@pytest.mark.parametrize("row", MENDED, ids=[w[0] for w in MENDED])
def test_the_nearest_legal_value_mends_it(row: Any) -> None:
    text, key, _, (value,) = row
    mapping = parse_mapping(text)
    error = refusal(mapping)
    if "unknown key" in error.limit or "no such mask" in error.limit:
        return  # what is near is a name
    if key == "tensors.values.list":
        value = [0.0] * value
    elif key == "attention.mask.key.valid":
        value = value if isinstance(value, list) else [value]
    try:
        Scenario.parse(set_dotted(mapping, {key: value}))
    except InvalidScenario as next_error:
        assert next_error.key not in (key, error.key)


def test_long_and_strange_input_stays_one_short_line() -> None:
    strange = "a\nb\x1b[31m\x00\u202e\u2028\x85\ud800"
    for mapping in (
        {strange: 1},
        {strange * 1000: 1},
        {"mesh": {strange: 1}},
        {"mesh": {"order": strange}},
        {"policy": strange},
        {"name": strange},
        {"engine": strange},
        {"engine": strange + ":x"},
        {"attention": {"mask": strange}},
        {"attention": {"mask": {strange: {}}}},
        {"attention": {"mask": {strange * 1000: {}}}},
        {"attention": {"mask": {"key": {strange: 1}}}},
        {"attention": {"mask": {"key": {"valid": strange}}}},
        {"tokens": {"shards": list(range(4096))}},
        {"mesh": {"ring": 10**5000}},
        {"mesh": {"ring": object()}},
        {"mesh": {"ring": {1, 2}}},
        {"attention": {"mask": {1: 2}}},
        {"attention": {"mask": {("a", "b"): 2}}},
        {"tensors": {"values": {1: 2}}},
    ):
        with pytest.raises(InvalidScenario) as caught:
            Scenario.parse(mapping)
        message = str(caught.value)
        assert message.isprintable() and len(message) < 500, message[:600]
        json.dumps(caught.value.as_json(), allow_nan=False, ensure_ascii=False).encode()


def test_absurd_nesting_from_a_caller_is_refused_too() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for mapping in ({"attention": {"mask": deep}}, {"mesh": deep}, {"tokens": {"shards": deep}}):
        assert "too large to print" in str(refusal(mapping))
    while deep:  # a nest this deep must not be freed by recursion
        deep = deep[0]


def test_a_mapping_that_is_none_is_refused() -> None:
    for nothing in (None, [], 3, "mesh"):
        with pytest.raises(InvalidScenario):
            Scenario.parse(nothing)  # type: ignore[arg-type]


def test_the_first_problem_is_told_and_the_rest_counted() -> None:
    error = refusal({"tensors": {"batch": 0, "heads": 0, "headz": 1}})
    assert error.key == "tensors.headz"
    assert str(error).endswith("(and 2 more problems)")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["key", "valid", "holes", "window", "list", "", "x"]), inner, max_size=2
        )
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(Scenario.parse({}).dotted())), ANYTHING)
def test_whatever_stands_at_a_key_is_legal_or_refused(key: str, value: Any) -> None:
    for mapping in (set_dotted({}, {key: value}), {"attention": {"mask": [value, value]}}):
        try:
            Scenario.parse(mapping)
        except InvalidScenario as error:
            assert str(error).isprintable() and error.key
            json.dumps(error.as_json(), allow_nan=False)


# -- meaning -----------------------------------------------------------------------------------

DEFAULT = {
    "schema_version": 1,
    "mesh": {"ulysses": 1, "ring": 1, "order": "ulysses-inner"},
    "tensors": {
        "batch": 1,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 32,
        "dtype": "float32",
        "values": "normal",
    },
    "tokens": {
        "total": 48,
        "shards": "even",
        "documents": None,
        "layout": "contiguous",
        "replicated": {"prefix": 0, "suffix": 0, "kv_prefix": 0},
    },
    "attention": {
        "layer": "USPAttention",
        "causal": False,
        "mask": "none",
        "skip_sequence_parallel": False,
        "skip_kv": "full",
        "backend": "auto",
        "sglang_backend": "FA",
        "seq_lens": "auto",
    },
    "policy": "extended",
    "release": "0132848349",
    "engine": "builtin",
    "fault": None,
    "run": {"seed": 0, "device": "auto", "timeout_s": 60.0},
}
"""The contract's defaults, written out by hand."""


def test_defaults_are_the_contract_s() -> None:
    said = Scenario.parse({}).normalised()
    prose = {key: said.pop(key) for key in ("name", "title", "description", "expect")}
    assert said == DEFAULT
    assert prose["expect"] is None


def test_the_hash_is_that_of_the_canonical_json() -> None:
    text = json.dumps(DEFAULT, sort_keys=True, separators=(",", ":"))
    expected = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    assert Scenario.parse({}).hash == Scenario.parse(DEFAULT).hash == expected


def test_every_key_of_the_question_is_in_the_hash() -> None:
    base = Scenario.parse({"mesh": {"ring": 2}})
    changes = {
        "mesh.ulysses": 2,
        "mesh.ring": 4,
        "mesh.order": "ring-inner",
        "tensors.batch": 2,
        "tensors.heads": 16,
        "tensors.kv_heads": 4,
        "tensors.head_dim": 16,
        "tensors.dtype": "float64",
        "tensors.values": "ramp",
        "tokens.total": 96,
        "tokens.shards": "auto",
        "tokens.documents": [20, 28],
        "tokens.layout": "zigzag",
        "tokens.replicated.prefix": 1,
        "tokens.replicated.suffix": 1,
        "tokens.replicated.kv_prefix": 1,
        "attention.layer": "UlyssesAttention",
        "attention.causal": True,
        "attention.mask": {"window": {"left": 3}},
        "attention.skip_sequence_parallel": True,
        "attention.skip_kv": "sharded",
        "attention.backend": "sdpa",
        "attention.sglang_backend": "TORCH_SDPA",
        "attention.seq_lens": "never",
        "policy": "sglang",
        "release": "0.5.23",
        "engine": "sglang",
        "run.seed": 1,
        "run.device": "cpu",
        "run.timeout_s": 10,
    }
    hashes = {base.set({key: value}).hash for key, value in changes.items()}
    assert len(hashes | {base.hash}) == len(changes) + 1
    asked = {key for key in base.dotted() if key not in ("name", "title", "description", "expect")}
    assert asked - set(changes) == {"schema_version", "fault"}, "the format grew: add it here"


def test_prose_and_expectation_are_not_in_the_hash() -> None:
    base = Scenario.parse({})
    prose = {"name": "other", "title": "T", "description": "D", "expect": {"outcome": "wrong"}}
    assert base.set(prose).hash == base.hash


def test_the_hash_is_the_same_in_another_process() -> None:
    code = "from usp_viz import Scenario; print(Scenario.load('dense-mask-ring').hash)"
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert hashes == {Scenario.load("dense-mask-ring").hash}


def test_a_copy_is_validated_and_has_its_own_hash() -> None:
    base = Scenario.parse({"mesh": {"ring": 2}})
    assert base.hash == base.hash
    copy = base.model_copy(update={"policy": "sglang"})
    assert (copy.policy, base.policy) == ("sglang", "extended")
    assert copy.hash != base.hash
    assert copy == base.set({"policy": "sglang"})
    with pytest.raises(InvalidScenario, match=r"tokens\.total"):
        base.model_copy(update={"tokens": {"total": 7}})


def test_a_scenario_is_frozen_hashable_and_can_be_sent_to_a_process() -> None:
    scenario = Scenario.load("dense-mask-ring")
    with pytest.raises(ValueError, match="frozen"):
        scenario.policy = "sglang"  # type: ignore[misc]
    assert len({scenario, Scenario.load("dense-mask-ring")}) == 1
    again = pickle.loads(pickle.dumps(scenario))
    assert again == scenario and again.hash == scenario.hash


def test_masks_mean_the_same_however_they_are_written() -> None:
    alone, listed = {"window": {"left": 3, "right": None}}, [{"window": {"left": 3}}]
    hashes = {Scenario.parse({"attention": {"mask": m}}).hash for m in (alone, listed)}
    assert len(hashes) == 1
    hashes = {Scenario.parse({"attention": {"mask": m}}).hash for m in ("none", None, [])}
    assert hashes == {Scenario.parse({}).hash}


def test_shards_are_by_position() -> None:
    mesh = {"ulysses": 2, "ring": 2}
    tokens = {"even": (12,) * 4, "auto": (12,) * 4}
    for shards, expected in tokens.items():
        s = Scenario.parse({"mesh": mesh, "tokens": {"total": 48, "shards": shards}})
        assert s.shards == expected
    s = Scenario.parse({"mesh": mesh, "tokens": {"total": 7, "shards": "auto"}})
    assert s.shards == (2, 2, 2, 1)
    s = Scenario.parse({"mesh": mesh, "tokens": {"total": 3, "shards": "auto"}})
    assert s.shards == (1, 1, 1, 0)


def test_defaults_that_depend_on_others() -> None:
    s = Scenario.parse({"tensors": {"heads": 6}, "tokens": {"total": 10}})
    assert s.kv_heads == 6 and s.documents == (10,)
    assert (
        Scenario.parse({"tensors": {"heads": 6, "kv_heads": 6}}).hash
        == Scenario.parse({"tensors": {"heads": 6}}).hash
    )


# -- round trips -------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)


@settings(max_examples=40, deadline=None)
@given(scenarios(policies=("sglang", "unguarded", "extended")), TEXT, TEXT)
def test_yaml_json_and_dotted_pairs_say_the_same(s: Scenario, title: str, more: str) -> None:
    s = s.set({"title": title, "description": more, "expect": {"outcome": "verified"}})
    said = s.normalised()
    for text in (
        yaml.safe_dump(said, allow_unicode=True),
        yaml.safe_dump(said, default_flow_style=True, sort_keys=False),
        json.dumps(said),
        json.dumps(said, indent=2, ensure_ascii=False),
        yaml.safe_dump(said).replace("\n", "\r\n")
        if "\n" not in title + more
        else json.dumps(said),
    ):
        again = Scenario.parse(parse_mapping(text))
        assert again.normalised() == said and again.hash == s.hash
    pairs = [f"{key}={json.dumps(value)}" for key, value in s.dotted().items()]
    assert Scenario.parse(set_dotted({}, parse_sets(pairs))).normalised() == said


@settings(max_examples=40, deadline=None)
@given(mappings(), st.randoms(use_true_random=False))
def test_the_order_of_keys_and_written_out_defaults_do_not_matter(
    mapping: Any, random: Any
) -> None:
    def shuffled(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        items = list(node.items())
        random.shuffle(items)
        return {key: shuffled(value) for key, value in items}

    s = Scenario.parse(mapping)
    assert Scenario.parse(shuffled(mapping)).hash == s.hash
    assert Scenario.parse(shuffled(s.normalised())).hash == s.hash
    assert Scenario.parse(s.as_written()) == s


@settings(max_examples=40, deadline=None)
@given(scenarios())
def test_what_was_not_written_stays_unwritten(s: Scenario) -> None:
    """A set key changes that key alone, and what depends on it by default."""
    changed = s.set({"run.seed": 5, "release": RELEASES[-1]})
    before, after = s.dotted(), changed.dotted()
    assert {k for k in before if before[k] != after[k]} <= {"run.seed", "release"}
    assert after["run.seed"] == 5
    assert changed.set({"run.seed": s.run.seed, "release": s.release}).hash == s.hash
