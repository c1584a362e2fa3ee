"""What a release of sglang computes where it raises nothing, the wrong rows included.

A `Behaviour` describes one call in words that a planner and an executor can each turn into rows
and pairs by themselves. It is read from the layers' code and checked against the genuine classes,
run on gloo ranks; only FlashAttention's kernel was replaced there, by its definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from usp_viz.calls import Call
from usp_viz.rule_table import prefix_serves_mask, ring_serves_pad
from usp_viz.scenario import Dense, Policy, Scenario, Window

Part = Literal["kv_prefix", "prefix", "rows", "suffix"]
COUNTED = 768
"""Up to this many rows `is_right` counts pairs; beyond, a reason for doubt is enough."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one call attends.

    Attributes:
        exchange: Who swaps heads for sequence: nobody, each Ulysses group, or all ranks together
            (UlyssesAttention: heads are split P ways, and no ring is used).
        ring: Which hop distances t a ring index r attends: ``none``, its own rows only; ``all``;
            ``earlier``, t <= r; ``real``, those whose rows begin before the padding does. KV
            travels one position a hop unless ``none``.
        copies: Replicated rows stay ``apart``, on every rank, and count once; or are handled as if
            they were rows of the shard (``sharded``), swapped, sent on, and counted once per rank.
        parts: The order in which a call sees its rows; a causal triangle depends on it. "rows" is
            the gathered rows, in position order.
        causal: ``off``; or a triangle in every single kernel call, aligned on the ``last`` query
            and key or on the ``first``. A ring makes one call per hop, and one for the copies.
        mask: What is honoured: ``none``; ``keys``, valid keys by row; ``pairs``, all masks and
            documents but not the causal flag; ``span``, places [start, stop) of the gathered
            tensor, whatever rows are there.
        span: For ``span``, and for the ring ``real``: where padding starts and stops.
        documents: seq_lens cut a rank's own rows into documents.
        unseen: What a query that sees nothing gives: ``zero``; ``mean``, all keys alike; ``all``,
            all keys by their scores (float16 cannot tell a masked score from its neighbours);
            ``nan``.
        narrow: Partial results are merged in float32, even for float64.
    """

    exchange: Literal["none", "ulysses", "world"]
    ring: Literal["none", "all", "earlier", "real"] = "none"
    copies: Literal["apart", "sharded"] = "apart"
    parts: tuple[Part, ...] = ("kv_prefix", "prefix", "rows", "suffix")
    causal: Literal["off", "last", "first"] = "off"
    mask: Literal["none", "keys", "pairs", "span"] = "none"
    span: tuple[int, int] | None = None
    documents: bool = False
    unseen: Literal["zero", "mean", "all", "nan"] = "zero"
    narrow: bool = False


def behaviour(scenario: Scenario, policy: Policy = "sglang") -> Behaviour:
    """What the scenario's release computes; only meaningful where `rules.ending` finds no end."""
    return of_call(Call(scenario, scenario.release, policy == "unguarded"))


def of_call(call: Call) -> Behaviour:
    """The behaviour of a call that returns."""
    if not call.usp:
        return _ulysses(call)
    if call.local:
        return _local(call)
    if call.has_seq_lens:  # behind the guard too: the ring is not used
        return Behaviour("ulysses", causal=_triangle(call, equal=True))
    if call.masked:
        return _masked(call)
    if not call.replicated_modes:
        return Behaviour(
            "ulysses",
            ring="none" if call.ring == 1 else "earlier" if call.causal else "all",
            causal=_triangle(call, equal=True),
            narrow=call.ring > 1,
        )
    return _replicated(call) if call.since("0.5.18") else _replicated_before(call)


def _triangle(call: Call, equal: bool) -> Literal["off", "last", "first"]:
    """SDPA aligned on the first row until 0.5.18; only unequal lengths can tell."""
    if not call.causal:
        return "off"
    first = call.backend == "TORCH_SDPA" and not call.since("0.5.18") and not equal
    return "first" if first else "last"


def _ulysses(call: Call) -> Behaviour:
    return Behaviour(
        "none" if call.world == 1 else "ulysses" if call.has_seq_lens else "world",
        parts=("rows", "prefix", "suffix"),
        causal=_triangle(call, equal=True),
    )


def _local(call: Call) -> Behaviour:
    if call.tensor != "none":
        return Behaviour("none", mask=call.tensor, unseen=_masked_out(call))
    documents = call.has_seq_lens and call.since("0.5.23")
    # A document's queries and keys are at the same places, so that its triangle starts there.
    causal = "first" if documents and call.causal else _triangle(call, equal=False)
    return Behaviour("none", causal=causal, documents=documents)


def _masked_out(call: Call) -> Literal["mean", "all"]:
    """SDPA's mask is the dtype's lowest number, added to the scores."""
    return "all" if call.scenario.tensors.dtype == "float16" else "mean"


def _masked(call: Call) -> Behaviour:
    if ring_serves_pad(call):
        return Behaviour("ulysses", ring="real", span=call.pad, narrow=True)
    sharded = call.replicated_modes > 0 and not prefix_serves_mask(call)
    return Behaviour(
        "ulysses",
        copies="sharded" if sharded else "apart",
        mask="span" if call.pad is not None else "keys",
        span=call.pad,
        unseen=_masked_out(call),
    )


def _replicated(call: Call) -> Behaviour:
    ring = call.ring > 1
    return Behaviour(
        "ulysses",
        ring="all" if ring else "none",
        causal=_triangle(call, equal=call.kv_prefix == 0),
        unseen="nan" if ring else "zero",
        narrow=ring,
    )


def _replicated_before(call: Call) -> Behaviour:
    """0.5.16 and 0.5.17: a pure ring takes the copies for rows of the shards."""
    if call.ulysses == 1:
        return Behaviour(
            "ulysses",
            ring="earlier" if call.causal else "all",
            copies="sharded",
            causal=_triangle(call, equal=True),
            narrow=True,
        )
    return Behaviour(
        "ulysses",
        parts=("kv_prefix", "prefix", "suffix", "rows"),
        causal=_triangle(call, equal=call.kv_prefix == 0),
    )


# -- right or wrong ----------------------------------------------------------------------------


def is_right(call: Call) -> bool:
    """Whether a call that returns gives every scored row what the scenario means.

    Exact in who sees whom, up to `COUNTED` rows. A difference that stays below the tolerance, as
    in low precision, is still called wrong.
    """
    tokens = call.scenario.tokens
    if not doubts(call):
        return True
    if tokens.total + call.prefix + call.suffix + call.kv_prefix > COUNTED:
        return False
    from usp_viz.seen import agrees

    return agrees(call)


def doubts(call: Call) -> tuple[tuple[str, str], ...]:
    """(id, sentence) of everything about a call that can make its rows wrong."""
    return tuple(_doubts(call, of_call(call)))


def _doubts(call: Call, found: Behaviour) -> Iterator[tuple[str, str]]:
    release = call.release
    ring = call.ring > 1
    if found.exchange == "ulysses" and found.ring == "none" and ring:
        yield (
            "own-group-only",
            "The all-to-all spans the Ulysses group and KV travels no ring: each row sees the keys "
            "of its own Ulysses group only.",
        )
    if found.ring == "earlier" and found.causal != "off":
        yield (
            "causal-ring",
            f"causal + ring is silently wrong in release {release}: every hop is cut by a lower "
            "triangle, also blocks from earlier ranks; the first ring position is right, later "
            "ones are not.",
        )
    if found.ring == "all" and found.causal != "off":
        text = "every hop, and the replicated rows by themselves, are cut by a lower triangle"
        if found.unseen == "nan" and call.prefix + call.suffix > 0:
            text += "; rows that see nothing at a hop come out as NaN"
        yield (
            "causal-ring-replicated",
            f"causal + ring with replicated rows is silently wrong in release {release}: {text}.",
        )
    if call.causal and found.causal == "off" and not _backward_window(call):
        yield (
            "causal-dropped",
            f"The masked path of release {release} ignores the causal flag: rows see later keys.",
        )
    if found.causal == "first" and not found.documents:
        yield (
            "causal-top-left",
            f"SDPA in release {release} aligns the causal triangle on the first key: with more "
            "keys than queries, rows see too few.",
        )
    if found.causal != "off" and _reordered(call) and not call.skip:
        yield (
            "layout-causal",
            f"sglang takes the {call.scenario.tokens.layout} layout for contiguous: the causal "
            "triangle follows the places of rows, not their order.",
        )
    yield from _copy_doubts(call, found)
    yield from _mask_doubts(call, found)
    if call.skip and call.world > 1:
        yield from _skip_doubts(call, found)
    if found.narrow and call.scenario.tensors.dtype == "float64":
        yield (
            "float32-merge",
            f"Release {release} merges hops in float32: float64 keeps about 7 digits.",
        )


def _reordered(call: Call) -> bool:
    """Whether gathered rows are out of order."""
    return call.scenario.tokens.layout != "contiguous" and call.ring > 1


def _backward_window(call: Call) -> bool:
    """Whether a window that is honoured hides all later rows by itself."""
    windows = [m.window for m in call.scenario.attention.mask if isinstance(m, Window)]
    return any(w.right == 0 for w in windows) and not call.replicated_modes


def _behind(call: Call, found: Behaviour) -> bool:
    """Whether causal order alone keeps every row from the padding behind it."""
    tail = call.pad is not None and call.pad[1] == call.scenario.tokens.total
    return tail and call.world == 1 and found.causal != "off" and not call.suffix


def _may_see_nothing(call: Call) -> bool:
    """Only a dense mask can hide a valid query's own key; a thin one, all of them."""
    dense = [m.dense for m in call.scenario.attention.mask if isinstance(m, Dense)]
    share = math.prod(mask.density for mask in dense)
    return bool(dense) and share * call.scenario.tokens.total < 64


def _copy_doubts(call: Call, found: Behaviour) -> Iterator[tuple[str, str]]:
    if found.copies == "sharded" and call.replicated_modes:
        yield (
            "copies-repeated",
            f"Release {call.release} takes replicated rows for rows of the shard: their keys count "
            "once per rank.",
        )
    if call.causal and found.copies == "apart" and not call.local:
        late = found.parts.index("rows")
        if call.prefix and "prefix" in found.parts[late:]:
            yield (
                "prefix-last",
                "UlyssesAttention appends replicated rows: a causal prefix is taken for the end.",
            )
        if call.suffix and "suffix" in found.parts[:late]:
            yield (
                "suffix-first",
                f"Release {call.release} moves a replicated suffix to the front: as a causal "
                "prefix, everyone sees it.",
            )
    if call.causal and not call.usp and call.local and call.prefix:
        yield (
            "prefix-last",
            "UlyssesAttention appends replicated rows: a causal prefix is taken for the end.",
        )


def _mask_doubts(call: Call, found: Behaviour) -> Iterator[tuple[str, str]]:
    total = call.scenario.tokens.total
    ignored = call.usp and found.mask == "none" and found.ring != "real"
    if ignored and call.pad is not None and call.pad[0] < call.pad[1] and not _behind(call, found):
        yield (
            "metadata-ignored",
            "Pad metadata counts only under sequence parallelism: here padding is attended.",
        )
    if found.ring == "real" and call.pad is not None and call.pad[1] < total:
        yield (
            "gap-on-ring",
            "The ring-aware path takes the start of a gap for the end of the sequence: rows behind "
            "it come out as zeros, their keys are missing.",
        )
    if found.span is not None and _reordered(call):
        yield (
            "layout-pad",
            f"sglang takes the {call.scenario.tokens.layout} layout for contiguous: the metadata "
            "masks places, not rows.",
        )
    if found.mask == "span" and (found.copies == "sharded" or call.ring > 1):
        yield (
            "metadata-shifted",
            "The metadata masks places of the gathered tensor, which holds other rows there.",
        )
    if found.mask == "pairs" and _may_see_nothing(call):
        yield (
            "unseen-mean",
            "A query whose keys are all masked comes out as the mean of all values, not as zero.",
        )
    if call.documents and call.documents_as_seq_lens and not found.documents:
        text = "reads seq_lens as shard lengths" if not call.local else "ignores seq_lens here"
        yield (
            "documents-ignored",
            f"Release {call.release} {text}: rows see the keys of other documents.",
        )
    if found.documents and not call.documents_as_seq_lens and len(call.seq_lens(0)) > 1:
        yield (
            "seq-lens-as-documents",
            f"Release {call.release} reads the seq_lens of a local call as documents.",
        )


def _skip_doubts(call: Call, found: Behaviour) -> Iterator[tuple[str, str]]:
    if call.scenario.attention.skip_kv == "sharded":
        yield (
            "skip-sharded",
            "skip_sequence_parallel with sharded KV: each row sees the keys of its own rank only.",
        )
    elif found.causal != "off":
        yield (
            "skip-causal",
            "Under skip_sequence_parallel the causal triangle is aligned on a rank's own rows, as "
            "if they were the last of all.",
        )
    elif found.documents:
        yield (
            "skip-documents",
            "A local call with seq_lens sees as many keys as it has rows, from the first on.",
        )
