"""What sglang's layers refuse and what they crash on, by release, in the order of evaluation.

The first entry whose condition holds is what happens: constructor before call, then from the top
of `forward` down. Messages are sglang's (or torch's), word for word. A source line is that of the
condition: the ``if`` of a raise, or the assert. For the commit 0132848349 the lines of the three
guards are known; its other lines are the next release's, and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from usp_viz import remedies
from usp_viz.calls import Call

COMMIT, AFTER_COMMIT = "0132848349", "0.5.19"
Values = Mapping[str, Any]


def always(call: Call, position: int) -> bool:
    """Every rank raises."""
    return True


def nothing(call: Call, position: int) -> Values:
    """The message has no gaps."""
    return {}


@dataclass(frozen=True)
class Rule:
    """One way in which a call does not return.

    Attributes:
        id: Its name in results.
        cls: Class of the exception.
        texts: Its message by the first release that says so, with gaps.
        when: Whether a call meets it, unless an earlier rule ends the call.
        because: The facts of this call that make it so.
        values: What fills the gaps, by position.
        raises: Whether the rank at a position raises it; all do, unless it is a crash.
        deliberate: A refusal; otherwise a crash.
        guard: One of the three ring guards, which the policy `unguarded` skips.
        file: Where it is raised.
        lines: Line by release; the rule is there in these releases only. Empty: in all.
        fixes: Remedies, best first.
        severity, reason, who, before, prevent: As published, in our words: how bad; why it is
            refused; who meets it; what to check before calling; how not to meet it again.
    """

    id: str
    cls: str
    texts: Mapping[str, str]
    when: Callable[[Call], bool]
    because: Callable[[Call], list[str]]
    values: Callable[[Call, int], Values] = nothing
    raises: Callable[[Call, int], bool] = always
    deliberate: bool = True
    guard: bool = False
    file: str = "layer.py"
    lines: Mapping[str, int] = field(default_factory=dict[str, int])
    fixes: tuple[remedies.Remedy, ...] = ()
    severity: str = "error"
    reason: str = ""
    who: str = ""
    before: str = ""
    prevent: str = ""

    def exists(self, release: str) -> bool:
        """Whether this release has the rule."""
        if not self.lines:
            return True
        return release in self.lines or (release == COMMIT and AFTER_COMMIT in self.lines)

    def meets(self, call: Call) -> bool:
        """Whether the call runs into it."""
        return self.exists(call.release) and self.when(call) and not (self.guard and call.unguarded)

    def text(self, call: Call, position: int) -> str | None:
        """The message at a position; None where that rank does not raise."""
        if not self.raises(call, position):
            return None
        known = [text for release, text in self.texts.items() if call.since(release)]
        return known[-1].format(**self.values(call, position))

    def source(self, release: str) -> str:
        """Where it is raised, e.g. ``layer.py:878``."""
        if not self.lines:
            return self.file
        if release in self.lines:
            return f"{self.file}:{self.lines[release]}"
        return f"{self.file}:{self.lines[AFTER_COMMIT]} ({AFTER_COMMIT})"


def _lines(first: str, *numbers: int, commit: int | None = None) -> dict[str, int]:
    """Line numbers of consecutive releases from `first` on."""
    releases = ("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
    start = releases.index(first)
    found: dict[str, int] = dict(zip(releases[start : start + len(numbers)], numbers, strict=True))
    return found if commit is None else found | {COMMIT: commit}


# -- conditions --------------------------------------------------------------------------------


def ring_serves_pad(call: Call) -> bool:
    """Whether the ring-aware path takes this call: padding as metadata alone, on FA."""
    return (
        call.masked
        and call.pad is not None
        and call.ring > 1
        and call.backend == "FA"
        and (not call.causal if call.since("0.5.22") else call.batch == 1)
        and call.since("0.5.18")
    )


def _masked_sp(call: Call) -> bool:
    """The masked path under sequence parallelism."""
    return call.masked and not call.local


def prefix_serves_mask(call: Call) -> bool:
    """Whether a key mask and a replicated prefix go together."""
    only_prefix = call.prefix > 0 and call.replicated_modes == 1
    return call.since("0.5.20") and only_prefix and call.tensor == "keys" and call.ring == 1


def _mask_ring(call: Call) -> bool:
    return _masked_sp(call) and call.ring > 1 and not ring_serves_pad(call)


def _varlen(call: Call) -> bool:
    return call.has_seq_lens and not call.local


def _swaps(call: Call) -> bool:
    """USPAttention's own all-to-alls, of equal shards as far as it knows."""
    return call.usp and not call.local and not call.has_seq_lens


def _group_uneven(call: Call) -> bool:
    """Shards that differ inside a Ulysses group."""
    return any(len(set(call.group(position))) > 1 for position in range(call.world))


def _replicated_on_ring(call: Call) -> bool:
    """Replicated rows on a mesh with both degrees, on the path of their own."""
    both = call.ring > 1 and call.ulysses > 1
    return _swaps(call) and not call.masked and both and call.replicated_modes > 0


def _rings(call: Call) -> bool:
    """Whether KV travels a ring."""
    if call.ring == 1 or not _swaps(call) or (_masked_sp(call) and not ring_serves_pad(call)):
        return False
    return call.since("0.5.18") or call.ulysses == 1 or not call.replicated_modes


def _heads_clash(call: Call) -> bool:
    """SDPA with a mask gets no enable_gqa: KV heads must match, or be one."""
    group = 1 if call.local else call.ulysses
    kv_heads = call.kv_heads // group
    return call.masked and not ring_serves_pad(call) and kv_heads not in (1, call.heads // group)


def _keys_in_group(call: Call, position: int) -> int:
    """Key rows that a rank's Ulysses group gathers on the masked path."""
    copies = call.ulysses * (call.prefix + call.suffix + call.kv_prefix)
    return sum(call.group(position)) + copies


# -- facts ---------------------------------------------------------------------------------------


def _sp(call: Call) -> list[str]:
    return [f"world = {call.world} > 1", "sequence parallelism is not skipped"]


def _ring(call: Call) -> list[str]:
    return [f"ring = {call.ring} > 1"]


def _given(call: Call) -> list[str]:
    return [f"seq_lens = {call.seq_lens_text} is given"]


def _mask(call: Call) -> list[str]:
    if call.pad is not None:
        return [f"padding is given as metadata alone: rows [{call.pad[0]}, {call.pad[1]})"]
    if call.tensor == "keys":
        return ["a key mask is given as a tensor [B, S_local]"]
    documents = call.documents and not call.documents_as_seq_lens
    what = ["documents"] if documents else []
    what += [next(iter(type(m).model_fields)) for m in call.scenario.attention.mask]
    return [f"{' and '.join(what)} can only be handed over as a 4D mask"]


def _replicated(call: Call) -> list[str]:
    rows = {"prefix": call.prefix, "suffix": call.suffix, "kv_prefix": call.kv_prefix}
    return [f"replicated {name} = {n} > 0" for name, n in rows.items() if n]


def _why_mask_ring(call: Call) -> list[str]:
    facts = _ring(call) + _mask(call)
    if call.pad is not None and call.since("0.5.18"):
        if call.backend != "FA":
            facts.append(f"sglang_backend = {call.backend}, not FA")
        if call.since("0.5.22") and call.causal:
            facts.append("causal = true")
        if not call.since("0.5.22") and call.batch > 1:
            facts.append(f"batch = {call.batch} > 1")
    return [*facts, "sequence parallelism is not skipped"]


def _why_varlen_mask(call: Call) -> list[str]:
    masked = call.tensor != "none" or call.pad is not None
    return _given(call) + (_mask(call) if masked else []) + _replicated(call)


def _why_heads(call: Call) -> list[str]:
    return [f"heads = {call.heads} and {call.heads} % {call.ulysses} = {call.heads % call.ulysses}"]


def _why_kv_heads(call: Call) -> list[str]:
    rest = call.kv_heads % call.ulysses
    return [f"kv_heads = {call.kv_heads} and {call.kv_heads} % {call.ulysses} = {rest}"]


def _why_gqa(call: Call) -> list[str]:
    return [f"kv_heads = {call.kv_heads}, heads = {call.heads}"]


def _why_uneven(call: Call) -> list[str]:
    return [f"shards = {list(call.lengths)} differ in length", "seq_lens is not given"]


def _uneven(when: Callable[[Call], bool]) -> Rule:
    """One of the collectives that need equal shards."""
    return Rule(
        id="uneven-without-seq-lens",
        cls="RuntimeError",
        texts={
            "0.5.16": "gloo: Received data size doesn't match expected size. Is there a "
            "distributed collective mismatch in your code? (shards of {shards} rows are taken "
            "for equal)"
        },
        values=lambda call, position: {"shards": list(call.lengths)},
        when=when,
        because=_why_uneven,
        deliberate=False,
        fixes=(remedies.give_seq_lens, remedies.bucket),
        reason="without seq_lens every rank takes the others' shards to be as long as its own",
        prevent="pass seq_lens whenever shards can differ, or keep them equal",
    )


_DIM = "The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension"
_CAT = (
    "Sizes of tensors must match except in dimension {dim}. Expected size {a} but got size {b} "
    "for tensor number 1 in the list."
)

RULES: tuple[Rule, ...] = (
    # -- constructors ------------------------------------------------------------------------------
    Rule(
        id="ulysses-ring",
        cls="NotImplementedError",
        texts={
            "0.5.17": "UlyssesAttention's all-to-all spans the combined sequence parallel group "
            "and is not ring-aware; it would silently shuffle across ring ranks instead of "
            "rotating KV within them. Ring parallelism is not supported for models still using "
            "UlyssesAttention -- use USPAttention instead."
        },
        when=lambda call: not call.usp and call.ring > 1,
        because=lambda call: [*_ring(call), "the layer is UlyssesAttention", "it is being built"],
        guard=True,
        lines=_lines("0.5.17", 230, 302, 338, 379, 387, 401, 401, commit=338),
        fixes=(remedies.usp_class, remedies.ring_one, remedies.extended),
        severity="critical",
        reason="the all-to-all spans the combined group and would shuffle tokens across ring ranks",
        who="ring flags added to a model that still uses the old class; a launch script upgraded "
        "without the model; a port that kept the old class name",
        before="choose the class by the ring world size when the model is built",
        prevent="gate the class on the ring size; a 2-rank smoke run for every new model; search "
        "the model for the old class before switching ring on",
    ),
    Rule(
        id="usp-ring-backend",
        cls="RuntimeError",
        texts={
            "0.5.16": "Ring Attention is only supported for FlashAttention or SageAttention "
            "backends, but got {backend}. Please ensure your platform supports these backends.",
            "0.5.18": "Ring Attention requires a backend whose kernel exposes the softmax LSE for "
            "the per-hop merge; {backend} does not declare support (see "
            "AttentionBackend.supports_ring_rotation).",
        },
        values=lambda call, position: {"backend": call.backend},
        when=lambda call: (
            call.usp
            and call.ring > 1
            and call.backend == "TORCH_SDPA"
            and not (call.skip and call.since("0.5.18"))
        ),
        because=lambda call: [*_ring(call), f"sglang_backend = {call.backend} returns no LSE"],
        lines=_lines("0.5.16", 574, 583, 723, 774, 837, 849, 867, 890),
        fixes=(remedies.flash, remedies.ring_one, remedies.extended),
        reason="a ring merges partial results by their log-sum-exp, which SDPA does not return",
        prevent="pin the backend wherever ring is on",
    ),
    Rule(
        id="not-expressible",
        cls="NotExpressible",
        texts={"0.5.16": "UlyssesAttention has no argument for {what}; use USPAttention."},
        values=lambda call, position: {"what": ", ".join(call.unsayable)},
        when=lambda call: bool(call.unsayable),
        because=lambda call: [f"UlyssesAttention cannot be told of {w}" for w in call.unsayable],
        file="",
        fixes=(remedies.usp_class, remedies.usp_class_plain, remedies.extended),
        reason="the older layer takes Q, K, V, replicated rows and seq_lens, nothing else",
        prevent="use USPAttention where masks, skipping or KV-only rows are needed",
    ),
    # -- USPAttention.forward, seq_lens ------------------------------------------------------------
    Rule(
        id="seq-lens-unknown",
        cls="TypeError",
        texts={"0.5.16": "USPAttention.forward() got an unexpected keyword argument 'seq_lens'"},
        when=lambda call: call.usp and call.has_seq_lens,
        because=lambda call: [*_given(call), f"release {call.release} has no such argument"],
        lines=_lines("0.5.16", 611, 620),
        fixes=(remedies.newer_release, remedies.no_seq_lens, remedies.bucket, remedies.extended),
        reason="seq_lens came with 0.5.18",
        prevent="check the installed release before passing seq_lens",
    ),
    Rule(
        id="usp-varlen-mask",
        cls="AssertionError",
        texts={"0.5.18": "Varlen USPAttention does not support masks or replicated tokens"},
        when=lambda call: (
            call.usp
            and call.has_seq_lens
            and (call.tensor != "none" or call.pad is not None or call.replicated_modes > 0)
        ),
        because=_why_varlen_mask,
        lines=_lines("0.5.18", 811, 869, 944, 958, 977, 1000),
        fixes=(
            remedies.no_seq_lens,
            remedies.no_mask_no_copies,
            remedies.bucket,
            remedies.bucket_plain,
            remedies.extended,
        ),
        reason="the varlen path knows shard lengths and nothing else",
        prevent="pad to uniform lengths where a mask is needed",
    ),
    Rule(
        id="usp-local-varlen-batch",
        cls="NotImplementedError",
        texts={"0.5.23": "Local varlen USPAttention expects one packed batch row"},
        when=lambda call: call.usp and call.has_seq_lens and call.local and call.batch != 1,
        because=lambda call: [*_given(call), f"batch = {call.batch}", "the call is local"],
        lines=_lines("0.5.23", 1008),
        fixes=(remedies.no_seq_lens, remedies.batch_one, remedies.extended),
        reason="a local call reads seq_lens as the lengths of packed documents",
        prevent="pass seq_lens to a local call only for packed documents",
    ),
    Rule(
        id="usp-local-varlen-sum",
        cls="ValueError",
        texts={"0.5.23": "sum(seq_lens)={total} must match packed length {rows}"},
        values=lambda call, position: {
            "total": sum(call.seq_lens(position)),
            "rows": call.query_rows(position),
        },
        when=lambda call: (
            call.usp
            and call.has_seq_lens
            and call.local
            and any(sum(call.seq_lens(p)) != call.query_rows(p) for p in range(call.world))
        ),
        raises=lambda call, p: sum(call.seq_lens(p)) != call.query_rows(p),
        because=lambda call: [
            *_given(call),
            f"a rank holds {call.query_rows(0)} query rows",
            "the call is local",
        ],
        lines=_lines("0.5.23", 1013),
        fixes=(remedies.no_seq_lens, remedies.extended),
        reason="a local call reads seq_lens as packed documents, which must cover its rows",
        prevent="do not pass shard lengths to a call that skips sequence parallelism",
    ),
    Rule(
        id="usp-varlen-ring",
        cls="NotImplementedError",
        texts={"0.5.18": "Varlen USPAttention does not support ring parallelism yet."},
        when=lambda call: call.usp and _varlen(call) and call.ring > 1,
        because=lambda call: _ring(call) + _given(call) + _sp(call),
        guard=True,
        lines=_lines("0.5.18", 820, 878, 953, 967, 986, 1030, commit=878),
        fixes=(
            remedies.ring_one,
            remedies.pad_tail,
            remedies.bucket,
            remedies.bucket_plain,
            remedies.extended,
        ),
        reason="the varlen all-to-all spans the combined SP group; it would shuffle rows across "
        "ring ranks instead of rotating KV",
        who="variable-length multimodal prompts on a ring deployment; ring switched on for "
        "throughput; a config change on a model with ragged batches",
        before="seq_lens is None or ring == 1 or sp == 1",
        prevent="validate at start-up; bucket lengths",
    ),
    Rule(
        id="varlen-gqa",
        cls="RuntimeError",
        texts={"0.5.16": _CAT},
        values=lambda call, position: {"dim": 0, "a": call.heads, "b": call.kv_heads},
        when=lambda call: call.usp and _varlen(call) and call.heads != call.kv_heads,
        because=lambda call: _given(call) + _why_gqa(call),
        deliberate=False,
        fixes=(remedies.expand_kv, remedies.bucket),
        reason="the varlen path stacks Q, K and V into one tensor",
        prevent="repeat the KV heads before the call",
    ),
    # -- UlyssesAttention.forward ------------------------------------------------------------------
    Rule(
        id="ulysses-varlen-replicated",
        cls="AssertionError",
        texts={"0.5.16": "Varlen Ulysses attention does not support replicated QKV"},
        when=lambda call: not call.usp and call.has_seq_lens and call.replicated_modes > 0,
        because=lambda call: _given(call) + _replicated(call),
        lines=_lines("0.5.16", 294, 303, 428, 468, 516, 526, 540, 540),
        fixes=(remedies.bucket, remedies.no_seq_lens, remedies.no_copies, remedies.extended),
        reason="the varlen path knows shard lengths and nothing else",
        prevent="pad to uniform lengths where text is replicated",
    ),
    Rule(
        id="ulysses-gqa",
        cls="RuntimeError",
        texts={"0.5.16": _CAT},
        values=lambda call, position: {"dim": 0, "a": call.heads, "b": call.kv_heads},
        when=lambda call: not call.usp and call.heads != call.kv_heads,
        because=_why_gqa,
        deliberate=False,
        fixes=(remedies.expand_kv, remedies.usp_class),
        reason="UlyssesAttention stacks Q, K and V into one tensor",
        prevent="repeat the KV heads before the call, or use USPAttention",
    ),
    Rule(
        id="ulysses-heads",
        cls="AssertionError",
        texts={
            "0.5.16": "head dimension ({heads}) must be divisible by sequence parallel world size "
            "({world})"
        },
        values=lambda call, position: {"heads": call.heads, "world": call.world},
        when=lambda call: not call.usp and not call.has_seq_lens and call.heads % call.world > 0,
        because=lambda call: [f"heads = {call.heads}", f"world = {call.world}"],
        file="base_device_communicator.py",
        lines=_lines("0.5.16", 137, 177, 177, 179, 179, 180, 180, 180),
        fixes=(remedies.fewer_heads_groups, remedies.usp_class, remedies.extended),
        reason="the all-to-all splits heads evenly over the whole sequence-parallel group",
        prevent="choose a world size that divides the heads",
    ),
    _uneven(lambda call: not call.usp and call.world > 1 and call.uneven and not call.has_seq_lens),
    # -- the varlen all-to-all, of either class ----------------------------------------------------
    Rule(
        id="usp-seq-lens-length",
        cls="AssertionError",
        texts={"0.5.16": "seq_lens must have length {ulysses}, got {given}"},
        values=lambda call, p: {"ulysses": call.ulysses, "given": len(call.seq_lens(p))},
        when=lambda call: (
            _varlen(call) and call.ulysses > 1 and len(call.seq_lens(0)) != call.ulysses
        ),
        because=lambda call: [*_given(call), f"ulysses = {call.ulysses}"],
        file="usp.py",
        lines=_lines("0.5.16", 153, 361, 485, 491, 505, 505, 557, 578),
        fixes=(remedies.shard_seq_lens, remedies.no_seq_lens, remedies.extended),
        reason="under sequence parallelism seq_lens are the shard lengths of one Ulysses group",
        prevent="pass one length for each Ulysses rank, never document lengths",
    ),
    Rule(
        id="usp-seq-lens-shard",
        cls="AssertionError",
        texts={"0.5.16": "s_local ({rows}) must equal seq_lens[{index}] ({given})"},
        values=lambda call, p: {
            "rows": call.lengths[p],
            "index": p % call.ulysses,
            "given": call.seq_lens(p)[p % call.ulysses],
        },
        when=lambda call: (
            _varlen(call)
            and call.ulysses > 1
            and any(call.seq_lens(p)[p % call.ulysses] != n for p, n in enumerate(call.lengths))
        ),
        raises=lambda call, p: call.seq_lens(p)[p % call.ulysses] != call.lengths[p],
        because=lambda call: [*_given(call), f"shards = {list(call.lengths)}"],
        file="usp.py",
        lines=_lines("0.5.16", 169, 377, 501, 507, 521, 521, 573, 594),
        fixes=(remedies.shard_seq_lens, remedies.no_seq_lens, remedies.extended),
        reason="under sequence parallelism seq_lens are the shard lengths of one Ulysses group",
        prevent="pass one length for each Ulysses rank, never document lengths",
    ),
    Rule(
        id="usp-heads",
        cls="AssertionError",
        texts={"0.5.16": "h_global ({heads}) must be divisible by world_size ({ulysses})"},
        values=lambda call, position: {"heads": call.heads, "ulysses": call.ulysses},
        when=lambda call: _varlen(call) and call.heads % call.ulysses > 0,
        because=_why_heads,
        file="usp.py",
        lines=_lines("0.5.16", 172, 380, 504, 510, 524, 524, 576, 597),
        fixes=(remedies.fewer_heads_groups, remedies.extended),
        reason="the all-to-all splits heads evenly",
        prevent="choose a Ulysses degree that divides query and KV heads",
    ),
    # -- USPAttention.forward, masked --------------------------------------------------------------
    Rule(
        id="usp-mask-replicated",
        cls="NotImplementedError",
        texts={
            "0.5.18": "USPAttention's masked path does not support replicated prefix/suffix "
            "tokens under sequence parallelism; drop attn_mask/attn_mask_meta or the replicated "
            "segment."
        },
        when=lambda call: (
            _masked_sp(call) and call.replicated_modes > 0 and not prefix_serves_mask(call)
        ),
        because=lambda call: _mask(call) + _replicated(call) + _sp(call),
        lines=_lines("0.5.18", 884, 954, 1061, 1075, 1103, 1147),
        fixes=(
            remedies.newer_release,
            remedies.no_mask,
            remedies.no_copies,
            remedies.extended,
        ),
        reason="the masked path shards every row, so that a replicated one would count repeatedly",
        prevent="keep masked calls and replicated text apart",
    ),
    Rule(
        id="usp-mask-ring",
        cls="NotImplementedError",
        texts={
            "0.5.16": "USPAttention masked path does not support ring parallelism yet.",
            "0.5.18": "USPAttention masked path supports ring parallelism only for batch-1 "
            "tail-pad metadata on the FA backend.",
            "0.5.22": "USPAttention masked path supports ring parallelism only for non-causal "
            "tail-pad metadata on the FA backend.",
        },
        when=_mask_ring,
        because=_why_mask_ring,
        guard=True,
        lines=_lines("0.5.16", 762, 772, 992, 1117, 1206, 1231, 1259, 1303, commit=1053),
        fixes=(
            remedies.tail_metadata,
            remedies.ring_one,
            remedies.newer_release,
            remedies.batch_one,
            remedies.flash,
            remedies.no_mask,
            remedies.extended,
        ),
        reason="only padding at the tail, as metadata alone, has a ring-aware implementation",
        who="batched image/video generation with padding masks; backend changed from FA to "
        "FlashInfer or Triton while ring is on; a boolean [B, S] mask instead of pad metadata",
        before="not (ring > 1 and masked) or (pad-only and B == 1 and backend is FA)",
        prevent="one request per forward step with tail padding; pin FA; prefer pad-only metadata "
        "to boolean masks",
    ),
    Rule(
        id="usp-mask-4d",
        cls="NotImplementedError",
        texts={"0.5.16": "USPAttention masked SP path currently expects a [B, S_local] key mask."},
        when=lambda call: _masked_sp(call) and call.tensor == "pairs",
        because=lambda call: _mask(call) + _sp(call),
        lines=_lines("0.5.16", 766, 776, 1003, 1128, 1217, 1242, 1270, 1314),
        fixes=(remedies.no_mask, remedies.one_rank, remedies.extended),
        reason="ranks gather key masks only",
        prevent="keep documents, windows and dense masks to calls that one rank can serve",
    ),
    _uneven(
        lambda call: (
            _masked_sp(call)
            and call.tensor == "keys"
            and call.uneven
            and (call.since("0.5.22") or prefix_serves_mask(call))
        ),
    ),
    # -- USPAttention.forward, unmasked ------------------------------------------------------------
    Rule(
        id="usp-two-replicated",
        cls="ValueError",
        texts={"0.5.16": "USPAttention supports at most one replicated-token mode per call."},
        when=lambda call: _swaps(call) and not call.masked and call.replicated_modes > 1,
        because=lambda call: _replicated(call) + _sp(call),
        lines=_lines("0.5.16", 934, 948, 1173, 1298, 1387, 1412, 1472, 1516),
        fixes=(remedies.one_copy, remedies.no_copies, remedies.extended),
        reason="each kind of replicated rows has a path of its own",
        prevent="merge replicated segments into one before the call",
    ),
    Rule(
        id="usp-replicated-ring",
        cls="NotImplementedError",
        texts={
            "0.5.17": "USPAttention replicated-prefix/suffix path does not support ring "
            "parallelism yet."
        },
        when=lambda call: _replicated_on_ring(call) and call.prefix + call.suffix > 0,
        because=lambda call: _ring(call) + _replicated(call),
        lines=_lines("0.5.17", 1028),
        fixes=(remedies.newer_release, remedies.ring_one, remedies.no_copies, remedies.extended),
        reason="that release attends replicated rows on the Ulysses path only",
        prevent="use 0.5.18 or later with replicated text on a ring",
    ),
    Rule(
        id="usp-kv-prefix-ring",
        cls="NotImplementedError",
        texts={
            "0.5.17": "USPAttention replicated-kv-prefix path does not support ring parallelism "
            "yet."
        },
        when=lambda call: _replicated_on_ring(call) and call.kv_prefix > 0,
        because=lambda call: _ring(call) + _replicated(call),
        lines=_lines("0.5.17", 1140),
        fixes=(remedies.newer_release, remedies.ring_one, remedies.no_copies, remedies.extended),
        reason="that release attends replicated rows on the Ulysses path only",
        prevent="use 0.5.18 or later with replicated text on a ring",
    ),
    # -- the all-to-alls ---------------------------------------------------------------------------
    Rule(
        id="usp-heads",
        cls="AssertionError",
        texts={"0.5.16": "h_global ({heads}) must be divisible by world_size ({ulysses})"},
        values=lambda call, position: {"heads": call.heads, "ulysses": call.ulysses},
        when=lambda call: _swaps(call) and call.heads % call.ulysses > 0,
        because=_why_heads,
        file="usp.py",
        lines=_lines("0.5.16", 104, 266, 309, 315, 329, 329, 368, 389),
        fixes=(remedies.fewer_heads_groups, remedies.extended),
        reason="the all-to-all splits heads evenly",
        prevent="choose a Ulysses degree that divides query and KV heads",
    ),
    _uneven(lambda call: _swaps(call) and _group_uneven(call)),
    Rule(
        id="usp-gqa-heads",
        cls="AssertionError",
        texts={"0.5.16": "h_global ({heads}) must be divisible by world_size ({ulysses})"},
        values=lambda call, position: {"heads": call.kv_heads, "ulysses": call.ulysses},
        when=lambda call: _swaps(call) and call.kv_heads % call.ulysses > 0,
        because=_why_kv_heads,
        file="usp.py",
        lines=_lines("0.5.16", 104, 266, 309, 315, 329, 329, 368, 389),
        fixes=(remedies.fewer_heads_groups, remedies.expand_kv, remedies.extended),
        reason="the all-to-all splits KV heads evenly, too, and copies none",
        prevent="choose a Ulysses degree that divides query and KV heads",
    ),
    Rule(
        id="replicated-slice",
        cls="RuntimeError",
        texts={"0.5.16": _CAT},
        values=lambda call, position: {
            "dim": 1,
            "a": 0,
            "b": (call.kv_heads if call.kv_prefix else call.heads) // call.ulysses,
        },
        when=lambda call: _replicated_on_ring(call) and call.release == "0.5.16",
        raises=lambda call, position: position >= call.ulysses,
        because=lambda call: [*_ring(call), f"ulysses = {call.ulysses} > 1", *_replicated(call)],
        deliberate=False,
        fixes=(remedies.newer_release, remedies.ring_one),
        reason="heads of replicated rows are cut by the rank, not by its place in the Ulysses "
        "group: later ring ranks cut none, the first ones attend without a ring",
        prevent="use 0.5.18 or later with replicated text on a ring",
    ),
    Rule(
        id="torch-ring-causal",
        cls="NotImplementedError",
        texts={"0.5.16": "is_causal requires the same query and context sequence lengths"},
        when=lambda call: (
            _rings(call)
            and not call.masked
            and not call.since("0.5.18")
            and call.causal
            and call.kv_prefix > 0
        ),
        because=lambda call: [*_ring(call), "causal = true", *_replicated(call)],
        file="torch _context_parallel/_attention.py",
        lines=_lines("0.5.16", 401, 401),
        fixes=(remedies.newer_release, remedies.ring_one, remedies.no_copies, remedies.extended),
        reason="torch's ring takes causal blocks of equal lengths only",
        prevent="use a later release with KV-only text",
    ),
    _uneven(lambda call: _rings(call) and call.uneven),
    _uneven(lambda call: _masked_sp(call) and call.tensor == "keys" and call.uneven),
    Rule(
        id="mask-gqa",
        cls="RuntimeError",
        texts={"0.5.16": _DIM + " 1"},
        values=lambda call, position: {
            "a": call.heads // (1 if call.local else call.ulysses),
            "b": call.kv_heads // (1 if call.local else call.ulysses),
        },
        when=_heads_clash,
        because=lambda call: _mask(call) + _why_gqa(call),
        deliberate=False,
        fixes=(remedies.expand_kv, remedies.no_mask),
        reason="the masked path calls SDPA without enable_gqa",
        prevent="repeat the KV heads before a masked call",
    ),
    Rule(
        id="mask-behind-guard",
        cls="RuntimeError",
        texts={"0.5.16": _DIM + " 3"},
        values=lambda call, p: {
            "a": _keys_in_group(call, p),
            "b": sum(_keys_in_group(call, q) for q in range(0, call.world, call.ulysses)),
        },
        when=lambda call: _mask_ring(call) and call.tensor == "keys",
        because=lambda call: [
            *_ring(call),
            "the mask is gathered from all ranks, the keys from one Ulysses group",
        ],
        deliberate=False,
        reason="the guard stands before a path that was written without a ring",
        prevent="leave the guard in place",
    ),
    Rule(
        id="pad-and-kv-prefix",
        cls="RuntimeError",
        texts={"0.5.16": _DIM + " 3"},
        values=lambda call, p: {"a": _keys_in_group(call, p), "b": sum(call.group(p))},
        when=lambda call: _masked_sp(call) and call.pad is not None and call.kv_prefix > 0,
        because=lambda call: _mask(call) + _replicated(call),
        deliberate=False,
        fixes=(remedies.no_copies,),
        reason="the mask is made for as many keys as there are queries",
        prevent="do not combine pad metadata with KV-only rows",
    ),
    Rule(
        id="all-padding",
        cls="AttributeError",
        texts={"0.5.16": "'NoneType' object has no attribute 'to'"},
        when=lambda call: ring_serves_pad(call) and call.pad is not None and call.pad[0] == 0,
        because=lambda call: [*_ring(call), "padding starts at row 0"],
        deliberate=False,
        fixes=(remedies.ring_one,),
        reason="no ring step has a real key, so that there is nothing to return",
        prevent="do not call attention for an empty request",
    ),
)
