"""The rules of each release: messages word for word, order, differences, fixes that fix."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest

from usp_viz import rules
from usp_viz.behaviour import behaviour
from usp_viz.calls import Call
from usp_viz.rule_table import RULES
from usp_viz.scenario import RELEASES, Scenario

COMMIT = "0132848349"
VARLEN_RING = "Varlen USPAttention does not support ring parallelism yet."
MASK_RING_16 = "USPAttention masked path does not support ring parallelism yet."
MASK_RING_18 = (
    "USPAttention masked path supports ring parallelism only for batch-1 tail-pad metadata on the "
    "FA backend."
)
MASK_RING_22 = (
    "USPAttention masked path supports ring parallelism only for non-causal tail-pad metadata on "
    "the FA backend."
)
ULYSSES_RING = (
    "UlyssesAttention's all-to-all spans the combined sequence parallel group and is not "
    "ring-aware; it would silently shuffle across ring ranks instead of rotating KV within them. "
    "Ring parallelism is not supported for models still using UlyssesAttention -- use "
    "USPAttention instead."
)
VARLEN_MASK = "Varlen USPAttention does not support masks or replicated tokens"
MASK_REPLICATED = (
    "USPAttention's masked path does not support replicated prefix/suffix tokens under sequence "
    "parallelism; drop attn_mask/attn_mask_meta or the replicated segment."
)
MASK_4D = "USPAttention masked SP path currently expects a [B, S_local] key mask."
TWO = "USPAttention supports at most one replicated-token mode per call."
BACKEND_18 = (
    "Ring Attention requires a backend whose kernel exposes the softmax LSE for the per-hop merge; "
    "TORCH_SDPA does not declare support (see AttentionBackend.supports_ring_rotation)."
)
BACKEND_16 = (
    "Ring Attention is only supported for FlashAttention or SageAttention backends, but got "
    "TORCH_SDPA. Please ensure your platform supports these backends."
)
UNKNOWN = "USPAttention.forward() got an unexpected keyword argument 'seq_lens'"

KEY = {"attention.mask": {"key": {"valid": [43]}}}
TAIL = {"attention.mask": {"tail_pad": {"start": 43}}}
UNEVEN = {"tokens.shards": [15, 9, 11, 13]}
ULYSSES = {"attention.layer": "UlyssesAttention"}
SKIP = {"attention.skip_sequence_parallel": True}
SDPA = {"attention.sglang_backend": "TORCH_SDPA"}
CAUSAL = {"attention.causal": True}


def scenario(mesh: str, *parts: dict[str, Any], release: str = COMMIT, **more: Any) -> Scenario:
    """S = 48, H = 8, D = 32 on a mesh like "2x1" (Ulysses x ring)."""
    ulysses, ring = map(int, mesh.split("x"))
    sets: dict[str, Any] = {"mesh.ulysses": ulysses, "mesh.ring": ring, "release": release}
    for part in parts:
        sets |= part
    return Scenario.parse({}).set(sets | more)


def refused(s: Scenario, policy: Any = "sglang") -> tuple[str, str, str, str] | None:
    found = rules.refusal(s, policy=policy)
    return found and (found.rule, found.cls, found.message, found.source)


# -- the three guards ------------------------------------------------------------------------------


def test_the_three_of_the_commit() -> None:
    assert refused(scenario("2x2", UNEVEN)) == (
        "usp-varlen-ring",
        "NotImplementedError",
        VARLEN_RING,
        "layer.py:878",
    )
    assert refused(scenario("2x2", KEY)) == (
        "usp-mask-ring",
        "NotImplementedError",
        MASK_RING_18,
        "layer.py:1053",
    )
    assert refused(scenario("2x2", ULYSSES)) == (
        "ulysses-ring",
        "NotImplementedError",
        ULYSSES_RING,
        "layer.py:338",
    )


VARLEN_LINES = {
    "0.5.18": 820,
    COMMIT: 878,
    "0.5.19": 878,
    "0.5.20": 953,
    "0.5.21": 967,
    "0.5.22": 986,
    "0.5.23": 1030,
}
MASK_LINES = {
    "0.5.16": 762,
    "0.5.17": 772,
    "0.5.18": 992,
    COMMIT: 1053,
    "0.5.19": 1117,
    "0.5.20": 1206,
    "0.5.21": 1231,
    "0.5.22": 1259,
    "0.5.23": 1303,
}
ULYSSES_LINES = {
    "0.5.17": 230,
    "0.5.18": 302,
    COMMIT: 338,
    "0.5.19": 338,
    "0.5.20": 379,
    "0.5.21": 387,
    "0.5.22": 401,
    "0.5.23": 401,
}


@pytest.mark.parametrize("release", RELEASES)
def test_the_three_in_every_release(release: str) -> None:
    varlen = refused(scenario("1x2", {"tokens.shards": [20, 28]}, release=release))
    if release in ("0.5.16", "0.5.17"):
        assert varlen is not None
        assert varlen[:3] == ("seq-lens-unknown", "TypeError", UNKNOWN)
    else:
        line = f"layer.py:{VARLEN_LINES[release]}"
        assert varlen == ("usp-varlen-ring", "NotImplementedError", VARLEN_RING, line)

    late = RELEASES.index(release) >= RELEASES.index("0.5.22")
    text = MASK_RING_22 if late else MASK_RING_18
    text = MASK_RING_16 if release in ("0.5.16", "0.5.17") else text
    line = f"layer.py:{MASK_LINES[release]}"
    masked = refused(scenario("1x2", KEY, release=release))
    assert masked == ("usp-mask-ring", "NotImplementedError", text, line)

    ulysses = refused(scenario("1x2", ULYSSES, release=release))
    if release == "0.5.16":
        assert ulysses is None
    else:
        line = f"layer.py:{ULYSSES_LINES[release]}"
        assert ulysses == ("ulysses-ring", "NotImplementedError", ULYSSES_RING, line)


def test_lines_that_nobody_knows_of_the_commit_say_whose_they_are() -> None:
    found = rules.refusal(scenario("2x1", {"attention.seq_lens": "always"}, KEY))
    assert found is not None and found.source == "layer.py:869 (0.5.19)"
    later = rules.refusal(found.call.scenario, release="0.5.23")
    assert later is not None and later.source == "layer.py:1000"


# -- every other refusal, word for word ------------------------------------------------------------

OTHERS: list[tuple[str, Scenario, str, str, str]] = [
    ("usp-ring-backend", scenario("1x2", SDPA), "RuntimeError", BACKEND_18, "774 (0.5.19)"),
    (
        "usp-ring-backend",
        scenario("1x2", SDPA, SKIP, release="0.5.17"),
        "RuntimeError",
        BACKEND_16,
        "583",
    ),
    (
        "seq-lens-unknown",
        scenario("2x1", {"tokens.shards": [20, 28]}, release="0.5.16"),
        "TypeError",
        UNKNOWN,
        "611",
    ),
    (
        "usp-varlen-mask",
        scenario("1x1", {"attention.seq_lens": "always", "tokens.replicated.suffix": 1}),
        "AssertionError",
        VARLEN_MASK,
        "869 (0.5.19)",
    ),
    (
        "usp-local-varlen-batch",
        scenario("1x1", {"attention.seq_lens": [20, 28], "tensors.batch": 2}, release="0.5.23"),
        "NotImplementedError",
        "Local varlen USPAttention expects one packed batch row",
        "1008",
    ),
    (
        "usp-local-varlen-sum",
        scenario("2x1", SKIP, {"attention.seq_lens": [20, 28]}, release="0.5.23"),
        "ValueError",
        "sum(seq_lens)=48 must match packed length 24",
        "1013",
    ),
    (
        "usp-mask-replicated",
        scenario("2x1", KEY, {"tokens.replicated.suffix": 7}, release="0.5.23"),
        "NotImplementedError",
        MASK_REPLICATED,
        "1147",
    ),
    (
        "usp-mask-4d",
        scenario("2x1", {"attention.mask": {"dense": {}}}, release="0.5.20"),
        "NotImplementedError",
        MASK_4D,
        "1217",
    ),
    (
        "usp-mask-4d",
        scenario("4x1", {"tokens.documents": [20, 28]}, release="0.5.16"),
        "NotImplementedError",
        MASK_4D,
        "766",
    ),
    (
        "usp-two-replicated",
        scenario("1x2", {"tokens.replicated.prefix": 1, "tokens.replicated.kv_prefix": 2}),
        "ValueError",
        TWO,
        "1298 (0.5.19)",
    ),
    (
        "usp-replicated-ring",
        scenario("2x2", {"tokens.replicated.suffix": 7}, release="0.5.17"),
        "NotImplementedError",
        "USPAttention replicated-prefix/suffix path does not support ring parallelism yet.",
        "1028",
    ),
    (
        "usp-kv-prefix-ring",
        scenario("2x2", {"tokens.replicated.kv_prefix": 7}, release="0.5.17"),
        "NotImplementedError",
        "USPAttention replicated-kv-prefix path does not support ring parallelism yet.",
        "1140",
    ),
    (
        "torch-ring-causal",
        scenario("1x2", CAUSAL, {"tokens.replicated.kv_prefix": 7}, release="0.5.16"),
        "NotImplementedError",
        "is_causal requires the same query and context sequence lengths",
        "401",
    ),
]
ELSEWHERE: list[tuple[str, Scenario, str, str, str]] = [
    (
        "usp-seq-lens-length",
        scenario("2x1", {"attention.seq_lens": [10, 20, 18]}, release="0.5.23"),
        "AssertionError",
        "seq_lens must have length 2, got 3",
        "usp.py:578",
    ),
    (
        "usp-heads",
        scenario("2x1", {"tensors.heads": 7}, release="0.5.16"),
        "AssertionError",
        "h_global (7) must be divisible by world_size (2)",
        "usp.py:104",
    ),
    (
        "usp-heads",
        scenario("2x1", {"tensors.heads": 7, "tokens.shards": [20, 28]}, release="0.5.23"),
        "AssertionError",
        "h_global (7) must be divisible by world_size (2)",
        "usp.py:597",
    ),
    (
        "usp-gqa-heads",
        scenario("4x1", {"tensors.kv_heads": 2}, release="0.5.23"),
        "AssertionError",
        "h_global (2) must be divisible by world_size (4)",
        "usp.py:389",
    ),
    (
        "ulysses-heads",
        scenario("4x1", ULYSSES, {"tensors.heads": 6}, release="0.5.23"),
        "AssertionError",
        "head dimension (6) must be divisible by sequence parallel world size (4)",
        "base_device_communicator.py:180",
    ),
    (
        "ulysses-varlen-replicated",
        scenario("2x1", ULYSSES, {"tokens.shards": [20, 28], "tokens.replicated.prefix": 1}),
        "AssertionError",
        "Varlen Ulysses attention does not support replicated QKV",
        "layer.py:468 (0.5.19)",
    ),
]


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: f"{case[0]}-{case[1].release}")
def test_refusals_of_the_layer_file(case: tuple[str, Scenario, str, str, str]) -> None:
    rule, s, cls, message, line = case
    found = refused(s)
    assert found is not None
    assert found[:3] == (rule, cls, message)
    assert found[3].split(":")[1] == line


@pytest.mark.parametrize("case", ELSEWHERE, ids=lambda case: f"{case[0]}-{case[1].release}")
def test_refusals_of_other_files(case: tuple[str, Scenario, str, str, str]) -> None:
    rule, s, cls, message, source = case
    assert refused(s) == (rule, cls, message, source)


def test_not_expressible_says_what_and_what_instead() -> None:
    s = scenario("2x1", ULYSSES, KEY, SKIP, {"tokens.replicated.kv_prefix": 3})
    found = rules.refusal(s)
    assert found is not None and (found.rule, found.cls) == ("not-expressible", "NotExpressible")
    for word in ("a mask", "kv_prefix", "skip_sequence_parallel", "USPAttention"):
        assert word in found.message


# -- which raise is first --------------------------------------------------------------------------

SEQ = {"attention.seq_lens": "always"}
BOTH = {"tokens.replicated.prefix": 1, "tokens.replicated.suffix": 1}
ORDER: list[tuple[str, str, Scenario]] = [
    ("constructor before call", "usp-ring-backend", scenario("2x2", SDPA, UNEVEN, KEY)),
    ("constructor before what it cannot say", "ulysses-ring", scenario("2x2", ULYSSES, KEY)),
    ("assert before ring", "usp-varlen-mask", scenario("2x2", UNEVEN, KEY)),
    (
        "unknown argument before masks",
        "seq-lens-unknown",
        scenario("2x2", UNEVEN, KEY, release="0.5.17"),
    ),
    (
        "batch before sum",
        "usp-local-varlen-batch",
        scenario("2x1", SKIP, {"attention.seq_lens": [1], "tensors.batch": 2}, release="0.5.23"),
    ),
    (
        "ring before seq_lens' length",
        "usp-varlen-ring",
        scenario("2x2", {"attention.seq_lens": [1, 2, 3]}),
    ),
    ("ring before heads", "usp-varlen-ring", scenario("2x2", UNEVEN, {"tensors.heads": 7})),
    (
        "length before heads",
        "usp-seq-lens-length",
        scenario("2x1", {"attention.seq_lens": [1, 2, 3], "tensors.heads": 7}),
    ),
    (
        "replicated before ring",
        "usp-mask-replicated",
        scenario("2x2", KEY, {"tokens.replicated.prefix": 7}),
    ),
    (
        "ring where copies are not looked at",
        "usp-mask-ring",
        scenario("2x2", KEY, {"tokens.replicated.prefix": 7}, release="0.5.17"),
    ),
    ("replicated before two of them", "usp-mask-replicated", scenario("2x1", KEY, BOTH)),
    ("ring before 4D", "usp-mask-ring", scenario("1x2", {"attention.mask": {"dense": {}}})),
    (
        "4D before heads",
        "usp-mask-4d",
        scenario("2x1", {"attention.mask": {"dense": {}}, "tensors.heads": 7}),
    ),
    ("two modes before heads", "usp-two-replicated", scenario("2x1", BOTH, {"tensors.heads": 7})),
    (
        "query heads before KV heads",
        "usp-heads",
        scenario("4x1", {"tensors.heads": 6, "tensors.kv_heads": 3}),
    ),
]


@pytest.mark.parametrize("case", ORDER, ids=lambda case: case[0])
def test_first_raise_wins(case: tuple[str, str, Scenario]) -> None:
    _, rule, s = case
    found = rules.refusal(s)
    assert found is not None and found.rule == rule


def test_unguarded_skips_the_three_and_nothing_else() -> None:
    assert rules.refusal(scenario("2x2", UNEVEN), policy="unguarded") is None
    assert rules.refusal(scenario("2x2", ULYSSES), policy="unguarded") is None
    assert rules.refusal(scenario("2x2", TAIL, SAGE), policy="unguarded") is None
    for rule, s in (
        ("usp-ring-backend", scenario("1x2", SDPA, UNEVEN_2)),
        ("usp-mask-4d", scenario("1x2", {"attention.mask": {"dense": {}}})),
        ("usp-mask-replicated", scenario("1x2", KEY, {"tokens.replicated.prefix": 7})),
        ("usp-heads", scenario("2x2", UNEVEN, {"tensors.heads": 7})),
        ("usp-seq-lens-length", scenario("2x2", {"attention.seq_lens": [1, 2, 3]})),
        ("not-expressible", scenario("2x2", ULYSSES, KEY)),
    ):
        found = rules.refusal(s, policy="unguarded")
        assert found is not None and found.rule == rule


SAGE = {"attention.sglang_backend": "SAGE_ATTN"}
UNEVEN_2 = {"tokens.shards": [20, 28]}


def test_extended_refuses_nothing() -> None:
    for case in (*OTHERS, *ELSEWHERE):
        assert rules.ending(case[1], policy="extended") is None
        assert rules.predict(case[1].set({"policy": "extended"})) == "verified"


# -- releases differ -------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
def test_tail_padding_on_a_ring(release: str) -> None:
    early = release in ("0.5.16", "0.5.17")
    late = release in ("0.5.22", "0.5.23")
    refuses = {
        "batch 1": early,
        "batch 2": not late,
        "causal": early or late,
        "SAGE": True,
        "a mask": True,
    }
    parts: dict[str, tuple[dict[str, Any], ...]] = {
        "batch 1": (TAIL,),
        "batch 2": (TAIL, {"tensors.batch": 2}),
        "causal": (TAIL, CAUSAL),
        "SAGE": (TAIL, SAGE),
        "a mask": (KEY,),
    }
    for name, given in parts.items():
        found = rules.refusal(scenario("2x2", *given, release=release))
        assert (found is not None) == refuses[name], name
        assert found is None or found.rule == "usp-mask-ring"


@pytest.mark.parametrize("release", RELEASES)
def test_prefix_and_key_mask_without_ring(release: str) -> None:
    s = scenario("2x1", KEY, {"tokens.replicated.prefix": 7}, release=release)
    found = rules.refusal(s)
    if release in ("0.5.18", COMMIT, "0.5.19"):
        assert found is not None and found.message == MASK_REPLICATED
    else:
        assert found is None
    wrong = [w.id for w in rules.warnings(s, "sglang")]
    assert wrong == (["copies-repeated"] if release in ("0.5.16", "0.5.17") else [])


def test_the_commit_agrees_with_its_neighbours() -> None:
    """0132848349 lies between 0.5.18 and 0.5.19, which agree in everything but line numbers."""
    texts = {
        release: [(rule.id, rule.exists(release), said(rule, release)) for rule in RULES]
        for release in ("0.5.18", COMMIT, "0.5.19")
    }
    assert texts["0.5.18"] == texts[COMMIT] == texts["0.5.19"]


def said(rule: Any, release: str) -> str | None:
    known = [t for r, t in rule.texts.items() if RELEASES.index(release) >= RELEASES.index(r)]
    return known[-1] if known else None


# -- what it says ----------------------------------------------------------------------------------


def test_because_names_the_values() -> None:
    found = rules.refusal(scenario("2x2", UNEVEN))
    assert found is not None
    assert found.because == (
        "ring = 2 > 1",
        "seq_lens = [15, 9, 11, 13] is given",
        "world = 4 > 1",
        "sequence parallelism is not skipped",
    )
    found = rules.refusal(scenario("2x2", TAIL, SAGE, {"tensors.batch": 3}))
    assert found is not None
    assert "sglang_backend = SAGE_ATTN, not FA" in found.because
    assert "batch = 3 > 1" in found.because
    assert "padding is given as metadata alone: rows [43, 48)" in found.because


def test_published_facts_are_at_hand() -> None:
    for rule, severity in (
        ("usp-varlen-ring", "error"),
        ("usp-mask-ring", "error"),
        ("ulysses-ring", "critical"),
    ):
        entry = rules.about(rule)
        assert entry.severity == severity
        assert entry.reason and entry.who and entry.before and entry.prevent
    with pytest.raises(KeyError, match="usp-varlen-ring"):
        rules.about("usp-varlen")
    assert all(entry.reason and entry.prevent for entry in RULES)


def test_details_are_plain_data() -> None:
    found = rules.refusal(scenario("2x2", UNEVEN))
    assert found is not None
    details = found.details()
    assert details["release"] == COMMIT and details["source"] == "layer.py:878"
    assert details["fixes"][0] == {
        "id": "ring-1",
        "title": "Ring off: --ulysses-degree 4 --ring-degree 1",
        "set": {"mesh.ring": 1, "mesh.ulysses": 4},
    }


# -- fixes -----------------------------------------------------------------------------------------


def test_published_remedies_are_offered() -> None:
    def ids(s: Scenario) -> set[str]:
        found = rules.refusal(s)
        assert found is not None
        return {fix.id for fix in found.fixes}

    assert {"ring-1", "bucket", "extended"} <= ids(scenario("2x2", UNEVEN))
    padded = scenario("2x2", {"tokens.total": 47, "tokens.shards": [15, 9, 11, 12]})
    assert {"ring-1", "pad", "bucket", "extended"} <= ids(padded)
    assert {"tail-metadata", "ring-1", "unmasked", "extended"} <= ids(scenario("2x2", KEY))
    assert {"batch-1", "newer-release"} <= ids(scenario("2x2", TAIL, {"tensors.batch": 2}))
    assert {"fa"} <= ids(scenario("2x2", TAIL, SAGE))
    assert {"usp-attention", "ring-1", "extended"} <= ids(scenario("2x2", ULYSSES))


def test_tail_metadata_on_fa_with_batch_one() -> None:
    s = scenario("2x2", {"attention.mask": {"key": {"valid": [43, 43]}}, "tensors.batch": 2}, SAGE)
    found = rules.refusal(s)
    assert found is not None
    fix = next(fix for fix in found.fixes if fix.id == "tail-metadata")
    changed = s.set(fix.set)
    assert (changed.tensors.batch, changed.attention.sglang_backend) == (1, "FA")
    assert rules.predict(changed.set({"policy": "sglang"})) == "verified"


def every_refusal(count: int) -> list[Scenario]:
    """Refused scenarios of all kinds: those above, and random ones."""
    found = [case[1] for case in (*OTHERS, *ELSEWHERE)]
    found += [case[2] for case in ORDER]
    rng = random.Random(5)
    while count:
        s = scrambled(rng)
        if rules.refusal(s) is not None:
            found.append(s)
            count -= 1
    return found


def scrambled(rng: random.Random) -> Scenario:
    mesh = rng.choice(["1x1", "2x1", "4x1", "1x2", "2x2", "1x4"])
    world = int(mesh[0]) * int(mesh[2])
    cuts = sorted(rng.randint(0, 48) for _ in range(world - 1))
    shards = [b - a for a, b in zip([0, *cuts], [*cuts, 48], strict=True)]
    masks: list[Any] = ["none", {"key": {"valid": [40]}}, {"tail_pad": {"start": 40}}]
    masks += [{"gap_pad": {"start": 3, "end": 9}}, {"dense": {}}, {"window": {"left": 3}}]
    sets: dict[str, Any] = {
        "tokens.shards": rng.choice(["even", "even", shards]),
        "tokens.documents": rng.choice([None, None, [20, 28]]),
        "attention.mask": rng.choice(masks),
        "attention.seq_lens": rng.choice(["auto", "auto", "always", "never", [20, 28], [48]]),
        "attention.layer": rng.choice(["USPAttention", "USPAttention", "UlyssesAttention"]),
        "attention.sglang_backend": rng.choice(["FA", "FA", "FA", "TORCH_SDPA", "SAGE_ATTN"]),
        "attention.skip_sequence_parallel": rng.random() < 0.1,
        "attention.causal": rng.random() < 0.3,
        "tensors.heads": rng.choice([8, 8, 8, 6]),
        "tensors.kv_heads": rng.choice([None, None, 2]),
        "tensors.batch": rng.choice([1, 1, 2]),
    }
    for name in ("prefix", "suffix", "kv_prefix"):
        sets[f"tokens.replicated.{name}"] = rng.choice([0, 0, 0, 3])
    return scenario(mesh, sets, release=rng.choice(RELEASES))


@pytest.mark.parametrize("s", every_refusal(150), ids=lambda s: str(s.release))
def test_every_fix_is_valid_and_runs(s: Scenario) -> None:
    found = rules.refusal(s)
    assert found is not None
    assert found.fixes, "there is always a way"
    assert len({fix.id for fix in found.fixes}) == len(found.fixes)
    assert len({repr(fix.set) for fix in found.fixes}) == len(found.fixes)
    for fix in found.fixes:
        changed = s.set({"policy": "sglang"} | fix.set)  # raises if it is not valid
        assert rules.predict(changed) == "verified", fix
        assert fix.title and fix.set


# -- crashes, warnings, predictions ----------------------------------------------------------------

SIZES = (
    "The size of tensor a ({}) must match the size of tensor b ({}) at non-singleton dimension {}"
)
CAT = (
    "Sizes of tensors must match except in dimension {}. Expected size {} but got size {} for "
    "tensor number 1 in the list."
)
CRASHES: list[tuple[str, str, str, Scenario, str]] = [
    (
        "uneven-without-seq-lens",
        "RuntimeError",
        "Received data size doesn't match expected size",
        scenario("2x1", UNEVEN_2, {"attention.seq_lens": "never"}),
        "sglang",
    ),
    (
        "uneven-without-seq-lens",
        "RuntimeError",
        "Received data size doesn't match expected size",
        scenario("1x2", UNEVEN_2, {"attention.seq_lens": "never"}),
        "sglang",
    ),
    (
        "mask-gqa",
        "RuntimeError",
        SIZES.format(4, 2, 1),
        scenario("2x1", KEY, {"tensors.kv_heads": 4}),
        "sglang",
    ),
    (
        "mask-behind-guard",
        "RuntimeError",
        SIZES.format(24, 48, 3),
        scenario("2x2", KEY),
        "unguarded",
    ),
    (
        "mask-behind-guard",
        "RuntimeError",
        SIZES.format(12, 48, 3),
        scenario("1x4", KEY),
        "unguarded",
    ),
    (
        "varlen-gqa",
        "RuntimeError",
        CAT.format(0, 8, 4),
        scenario("2x1", UNEVEN_2, {"tensors.kv_heads": 4}),
        "sglang",
    ),
    (
        "ulysses-gqa",
        "RuntimeError",
        CAT.format(0, 8, 4),
        scenario("1x1", ULYSSES, {"tensors.kv_heads": 4}),
        "sglang",
    ),
    (
        "replicated-slice",
        "RuntimeError",
        CAT.format(1, 0, 4),
        scenario("2x2", {"tokens.replicated.prefix": 7}, release="0.5.16"),
        "sglang",
    ),
    (
        "usp-seq-lens-shard",
        "AssertionError",
        "s_local (24) must equal seq_lens[1] (28)",
        scenario("2x1", {"attention.seq_lens": [24, 28]}),
        "sglang",
    ),
    (
        "all-padding",
        "AttributeError",
        "'NoneType' object has no attribute 'to'",
        scenario("1x2", {"attention.mask": {"tail_pad": {"start": 0}}}),
        "sglang",
    ),
]


@pytest.mark.parametrize("case", CRASHES, ids=lambda case: f"{case[0]}-{case[4]}")
def test_crashes(case: tuple[str, str, str, Scenario, Any]) -> None:
    rule, cls, message, s, policy = case
    found = rules.crash(s, policy=policy)
    assert found is not None and (found.rule, found.cls) == (rule, cls)
    assert message in found.message
    assert rules.refusal(s, policy=policy) is None
    assert rules.predict(s.set({"policy": policy})) == "crashed"
    assert [w.id for w in rules.warnings(s, policy)] == [rule]


def test_who_raises_where_not_everyone_does() -> None:
    found = rules.crash(scenario("2x2", {"tokens.replicated.prefix": 7}, release="0.5.16"))
    assert found is not None
    assert [message is not None for message in found.messages] == [False, False, True, True]
    s = scenario("2x1", {"attention.seq_lens": [20, 28]})
    both = rules.refusal(s)
    assert both is not None
    assert both.messages == (
        "s_local (24) must equal seq_lens[0] (20)",
        "s_local (24) must equal seq_lens[1] (28)",
    )


WARNINGS: list[tuple[str, Scenario, Any]] = [
    ("causal-ring", scenario("2x2", CAUSAL, release="0.5.23"), "sglang"),
    ("causal-ring-replicated", scenario("1x2", CAUSAL, {"tokens.replicated.prefix": 7}), "sglang"),
    ("causal-dropped", scenario("2x1", CAUSAL, KEY), "sglang"),
    ("causal-dropped", scenario("1x2", CAUSAL, TAIL), "sglang"),
    (
        "gap-on-ring",
        scenario("1x2", {"attention.mask": {"gap_pad": {"start": 10, "end": 15}}}),
        "sglang",
    ),
    ("metadata-ignored", scenario("2x1", SKIP, TAIL), "sglang"),
    (
        "metadata-ignored",
        scenario("1x1", CAUSAL, {"attention.mask": {"gap_pad": {"start": 2, "end": 3}}}),
        "sglang",
    ),
    ("metadata-ignored", scenario("1x1", CAUSAL, TAIL, {"tokens.replicated.suffix": 1}), "sglang"),
    (
        "documents-ignored",
        scenario("2x1", {"tokens.documents": [24, 24], "attention.seq_lens": [24, 24]}),
        "sglang",
    ),
    (
        "documents-ignored",
        scenario("1x1", {"tokens.documents": [20, 28], "attention.seq_lens": [20, 28]}),
        "sglang",
    ),
    ("skip-sharded", scenario("1x2", SKIP, {"attention.skip_kv": "sharded"}), "sglang"),
    (
        "copies-repeated",
        scenario("1x2", {"tokens.replicated.prefix": 7}, release="0.5.16"),
        "sglang",
    ),
    ("own-group-only", scenario("2x2", UNEVEN), "unguarded"),
    ("own-group-only", scenario("1x2", TAIL, SAGE), "unguarded"),
    ("layout-causal", scenario("2x2", CAUSAL, {"tokens.layout": "zigzag"}), "sglang"),
    (
        "suffix-first",
        scenario("2x1", CAUSAL, {"tokens.replicated.suffix": 7}, release="0.5.17"),
        "sglang",
    ),
    ("prefix-last", scenario("2x1", CAUSAL, ULYSSES, {"tokens.replicated.prefix": 7}), "sglang"),
    ("unseen-mean", scenario("1x1", {"attention.mask": {"dense": {"density": 0.01}}}), "sglang"),
    ("float32-merge", scenario("1x2", {"tensors.dtype": "float64"}), "sglang"),
]


@pytest.mark.parametrize("case", WARNINGS, ids=lambda case: f"{case[0]}-{case[1].release}")
def test_warnings_of_silently_wrong_rows(case: tuple[str, Scenario, Any]) -> None:
    name, s, policy = case
    found = rules.warnings(s, policy)
    assert name in [w.id for w in found]
    assert all(w.text.endswith(".") for w in found)
    assert rules.predict(s.set({"policy": policy})) == "wrong"


RIGHT: list[tuple[str, Scenario, Any]] = [
    ("dense ring", scenario("2x2"), "sglang"),
    ("causal, no ring", scenario("4x1", CAUSAL), "sglang"),
    ("tail padding on a ring", scenario("2x2", TAIL), "sglang"),
    ("prefix on a ring", scenario("2x2", {"tokens.replicated.prefix": 7}), "sglang"),
    ("skipped", scenario("1x2", SKIP), "sglang"),
    ("UlyssesAttention behind its guard", scenario("2x2", ULYSSES), "unguarded"),
    (
        "a causal ring of single rows sees each key once",
        scenario("1x2", CAUSAL, {"tokens.total": 2}),
        "sglang",
    ),
    ("causal rows never see an ignored tail", scenario("1x1", CAUSAL, TAIL), "sglang"),
    (
        "a mask that is causal by itself",
        scenario("1x1", CAUSAL, {"attention.mask": {"window": {"right": 0}}}),
        "sglang",
    ),
    (
        "equal values hide every mask",
        scenario("2x1", CAUSAL, KEY, {"tensors.values": "constant"}),
        "sglang",
    ),
    ("one group holds everything", scenario("1x2", {"tokens.shards": [0, 48]}), "unguarded"),
]


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case[0])
def test_no_warning_where_rows_are_right(case: tuple[str, Scenario, Any]) -> None:
    _, s, policy = case
    assert rules.ending(s, policy=policy) is None
    assert rules.warnings(s, policy) == ()
    assert rules.predict(s.set({"policy": policy})) == "verified"


def test_wrong_always_has_a_reason() -> None:
    rng = random.Random(11)
    wrong = 0
    for _ in range(400):
        s = scrambled(rng)
        for policy in ("sglang", "unguarded"):
            s = s.set({"policy": policy})
            if rules.predict(s) == "wrong":
                wrong += 1
                assert rules.warnings(s, policy)  # type: ignore[arg-type]
            elif rules.predict(s) in ("verified", "refused"):
                assert rules.warnings(s, policy) == ()  # type: ignore[arg-type]
    assert wrong > 30


def test_behaviour_of_the_paths_behind_the_guards() -> None:
    assert behaviour(scenario("2x2", ULYSSES), "unguarded").exchange == "world"
    varlen = behaviour(scenario("2x2", UNEVEN), "unguarded")
    assert (varlen.exchange, varlen.ring) == ("ulysses", "none")
    dense = behaviour(scenario("2x2", CAUSAL))
    assert (dense.exchange, dense.ring, dense.causal) == ("ulysses", "earlier", "last")


# -- how a scenario reaches the layer --------------------------------------------------------------


def test_seq_lens_are_the_lengths_of_the_own_group() -> None:
    call = Call(scenario("2x2", UNEVEN), COMMIT)
    assert [call.seq_lens(p) for p in range(4)] == [(15, 9), (15, 9), (11, 13), (11, 13)]
    listed = Call(scenario("2x2", {"attention.seq_lens": [1, 2, 3, 4]}), COMMIT)
    assert listed.seq_lens(3) == (3, 4)
    short = Call(scenario("2x2", {"attention.seq_lens": [1, 2, 3]}), COMMIT)
    assert short.seq_lens(3) == (1, 2, 3)
    assert not Call(scenario("2x2"), COMMIT).has_seq_lens


def test_masks_by_tensor_or_metadata() -> None:
    def kind(mask: Any, **sets: Any) -> tuple[str, Any]:
        call = Call(scenario("2x1", {"attention.mask": mask}, sets), COMMIT)
        return call.tensor, call.pad

    tail, gap = {"tail_pad": {"start": 43}}, {"gap_pad": {"start": 3, "end": 5}}
    key, window = {"key": {"valid": [40]}}, {"window": {"left": 3}}
    assert kind(tail) == ("none", (43, 48))
    assert kind(gap) == ("none", (3, 5))
    assert kind(key) == ("keys", None)
    assert kind([tail, gap]) == ("keys", None)
    assert kind([key, tail]) == ("keys", None)
    assert kind([key, window]) == ("pairs", None)
    assert kind("none", **{"tokens.documents": [20, 28]}) == ("pairs", None)
    assert kind("none", **{"tokens.documents": [0, 48]}) == ("none", None)
    said = {"tokens.documents": [20, 28], "attention.seq_lens": [20, 28]}
    assert kind("none", **said) == ("none", None)


def test_needs_no_torch_and_no_numpy_to_load() -> None:
    code = (
        "import sys, usp_viz.rules, usp_viz.behaviour; "
        "assert not {'torch', 'numpy'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
