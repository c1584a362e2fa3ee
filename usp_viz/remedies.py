"""What people do about a refusal, as changes to a scenario: one click each in the tool.

A remedy only proposes; `usp_viz.rules` keeps the proposals that are valid and really run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from usp_viz.calls import Call
from usp_viz.scenario import RELEASES, KeyMask


@dataclass(frozen=True, slots=True)
class Fix:
    """One change that makes a scenario run.

    Attributes:
        id: Its name.
        title: What to do, in one line.
        set: Dotted keys and values for `Scenario.set`.
    """

    id: str
    title: str
    set: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As in a result's ``error.fixes``."""
        return {"id": self.id, "title": self.title, "set": self.set}


Remedy = Callable[[Call], Iterator[Fix]]


def ring_one(call: Call) -> Iterator[Fix]:
    """Ring degree 1, on all ranks or on one Ulysses group's worth of them."""
    if call.ring == 1:
        return
    flags = f"--ulysses-degree {call.world} --ring-degree 1"
    yield Fix("ring-1", f"Ring off: {flags}", {"mesh.ring": 1, "mesh.ulysses": call.world})
    fewer: dict[str, Any] = {"mesh.ring": 1}
    if isinstance(call.scenario.tokens.shards, tuple):
        fewer["tokens.shards"] = "auto"
    flags = f"--ulysses-degree {call.ulysses} --ring-degree 1"
    yield Fix("ring-1-fewer-ranks", f"Ring off, on fewer ranks: {flags}", fewer)


def one_rank(call: Call) -> Iterator[Fix]:
    """No sequence parallelism at all."""
    single: dict[str, Any] = {"mesh.ring": 1, "mesh.ulysses": 1}
    if isinstance(call.scenario.tokens.shards, tuple):
        single["tokens.shards"] = "auto"
    yield Fix("one-rank", "One rank, no sequence parallelism", single)


def _uniform(call: Call) -> dict[str, Any]:
    """Even shards, and as many rows as that needs."""
    total, world = call.scenario.tokens.total, call.world
    up = -(-total // world) * world
    changes: dict[str, Any] = {"tokens.shards": "even"}
    if call.scenario.attention.seq_lens != "auto":
        changes["attention.seq_lens"] = "auto"
    if up != total:
        changes["tokens.total"] = up
        if call.scenario.tokens.documents:
            changes["tokens.documents"] = [*call.scenario.tokens.documents, up - total]
    return changes


def pad_tail(call: Call) -> Iterator[Fix]:
    """Uniform lengths, with the padding named by metadata alone."""
    total, changes = call.scenario.tokens.total, _uniform(call)
    if "tokens.total" in changes:
        mask = {"attention.mask": {"tail_pad": {"start": total}}}
        title = f"Pad to {changes['tokens.total']} rows, as tail-pad metadata, and keep ring"
        yield Fix("pad", title, changes | mask)


def bucket(call: Call) -> Iterator[Fix]:
    """Uniform lengths; then no seq_lens are needed."""
    changes = _uniform(call)
    rows = changes.get("tokens.total", call.scenario.tokens.total) // call.world
    yield Fix("bucket", f"Bucket to uniform lengths: {rows} rows on every rank", changes)


def bucket_plain(call: Call) -> Iterator[Fix]:
    """Uniform lengths, without the mask, the documents and the replicated rows in the way."""
    changes = _uniform(call) | _no_mask(call) | _no_copies(call)
    yield Fix("bucket-plain", "Bucket to uniform lengths, and call without masks", changes)


def give_seq_lens(call: Call) -> Iterator[Fix]:
    """Say that shards are uneven."""
    yield Fix("seq-lens", "Pass seq_lens", {"attention.seq_lens": "auto"})


def no_seq_lens(call: Call) -> Iterator[Fix]:
    """Leave seq_lens out."""
    yield Fix("no-seq-lens", "Do not pass seq_lens", {"attention.seq_lens": "never"})


def shard_seq_lens(call: Call) -> Iterator[Fix]:
    """Shard lengths, not document lengths."""
    title = "Pass the shard lengths of the Ulysses group"
    yield Fix("shard-seq-lens", title, {"attention.seq_lens": "always"})
    changes = {"attention.seq_lens": "always", "tokens.documents": None}
    yield Fix("shard-seq-lens-plain", title + ", for one document", changes)


def usp_class(call: Call) -> Iterator[Fix]:
    """The ring-aware layer."""
    yield Fix("usp-attention", "Use USPAttention", {"attention.layer": "USPAttention"})


def usp_class_plain(call: Call) -> Iterator[Fix]:
    """The ring-aware layer on a ring of one, where masks are served."""
    for fix in ring_one(call):
        changes = {"attention.layer": "USPAttention"} | fix.set
        yield Fix("usp-attention-" + fix.id, "Use USPAttention. " + fix.title, changes)


def flash(call: Call) -> Iterator[Fix]:
    """The backend whose kernel returns an LSE."""
    yield Fix("fa", "--attention-backend fa", {"attention.sglang_backend": "FA"})


def tail_metadata(call: Call) -> Iterator[Fix]:
    """A key mask that only pads the tail, said by metadata alone; batch 1 where it must be."""
    masks = call.scenario.attention.mask
    if len(masks) != 1 or not isinstance(masks[0], KeyMask):
        return
    key = masks[0].key
    if key.holes or len(set(key.valid)) > 1:
        return
    changes: dict[str, Any] = {"attention.mask": {"tail_pad": {"start": key.valid[0]}}}
    title = "Say the padding as tail-pad metadata instead of a mask"
    if call.batch > 1:
        yield Fix("tail-metadata", title, changes)
        changes |= {"tensors.batch": 1}
        title += ", one request at a time"
    if call.backend != "FA":
        changes |= {"attention.sglang_backend": "FA"}
        title += ", on FA"
    yield Fix("tail-metadata", title, changes)


def batch_one(call: Call) -> Iterator[Fix]:
    """One request per forward step."""
    if call.batch == 1:
        return
    changes: dict[str, Any] = {"tensors.batch": 1}
    masks = [mask.model_dump(mode="json") for mask in call.scenario.attention.mask]
    for mask in masks:
        if "key" in mask:
            mask["key"]["valid"] = mask["key"]["valid"][:1]
            changes["attention.mask"] = masks
    yield Fix("batch-1", "One request per forward step", changes)
    if call.backend != "FA":
        yield Fix("batch-1-fa", "One request per step, on FA", changes | _FA)


_FA = {"attention.sglang_backend": "FA"}


def _no_mask(call: Call) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if call.scenario.attention.mask:
        changes["attention.mask"] = "none"
    if call.scenario.tokens.documents:
        changes["tokens.documents"] = None
    return changes


def _no_copies(call: Call) -> dict[str, Any]:
    rows = {"prefix": call.prefix, "suffix": call.suffix, "kv_prefix": call.kv_prefix}
    return {f"tokens.replicated.{name}": 0 for name, n in rows.items() if n}


def no_mask(call: Call) -> Iterator[Fix]:
    """The unmasked path, if everything may see everything."""
    yield Fix("unmasked", "Call without a mask, if nothing is padding", _no_mask(call))
    if call.causal:  # a mask can hide the causal flag; without it the flag counts again
        changes = _no_mask(call) | {"attention.causal": False}
        yield Fix("unmasked-bidirectional", "Call without a mask and without causal", changes)


def no_copies(call: Call) -> Iterator[Fix]:
    """No replicated rows."""
    yield Fix("unreplicated", "Call without replicated rows", _no_copies(call))


def no_mask_no_copies(call: Call) -> Iterator[Fix]:
    """seq_lens alone."""
    changes = _no_mask(call) | _no_copies(call)
    yield Fix("seq-lens-alone", "Pass seq_lens alone", changes)


def one_copy(call: Call) -> Iterator[Fix]:
    """All replicated query rows in one segment."""
    rows = call.prefix + call.suffix
    if rows:
        names = {"prefix": rows, "suffix": 0, "kv_prefix": 0}
        changes = {f"tokens.replicated.{name}": n for name, n in names.items()}
        yield Fix("one-segment", f"Merge the replicated rows into one prefix of {rows}", changes)


def expand_kv(call: Call) -> Iterator[Fix]:
    """One KV head for each query head."""
    title = f"Repeat the KV heads to {call.heads} before the call"
    yield Fix("expand-kv", title, {"tensors.kv_heads": call.heads})


def fewer_heads_groups(call: Call) -> Iterator[Fix]:
    """The largest Ulysses degree that divides the heads."""
    degrees = [
        u
        for u in range(call.ulysses, 0, -1)
        if call.heads % u == 0 and call.kv_heads % u == 0 and call.world % u == 0
    ]
    for u in degrees:
        ring = call.world // u
        flags = f"--ulysses-degree {u} --ring-degree {ring}"
        yield Fix(f"ulysses-{u}", flags, {"mesh.ulysses": u, "mesh.ring": ring})
    yield from one_rank(call)


def newer_release(call: Call) -> Iterator[Fix]:
    """The first later release that takes the call."""
    for release in RELEASES[RELEASES.index(call.release) + 1 :]:
        yield Fix("newer-release", f"Upgrade to sglang {release}", {"release": release})


def extended(call: Call) -> Iterator[Fix]:
    """This tool's own path."""
    title = "Run it on this tool's ring-aware path (policy extended)"
    yield Fix("extended", title, {"policy": "extended"})
