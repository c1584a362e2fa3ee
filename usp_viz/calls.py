"""How a scenario reaches sglang's layers: the arguments of the constructor and of the call.

Key masks are a bool [B, S_local] tensor, a single pad is metadata alone; window, prefix-LM, dense
masks and packed documents, which the call cannot say otherwise, are one dense 4D mask, and so is a
list that has one of them in it. Several pads, or a pad beside a key mask, become one key mask: the
metadata holds a single span, and only stands alone. Uneven shards are ``seq_lens``: the U lengths
of the rank's own Ulysses group. An explicit list is handed over as it is; one that equals the
documents says the documents, and no mask does. Replicated rows are counts (USPAttention) or
tensors of their own (UlyssesAttention). Layouts only reorder the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from usp_viz.scenario import RELEASES, GapPad, KeyMask, Scenario, TailPad

PAIR_MASKS = ("window", "prefix_lm", "dense")
Tensor = Literal["none", "keys", "pairs"]


@dataclass(frozen=True)
class Call:
    """One call of an attention layer of one release, the same for all ranks but for the shard.

    Attributes:
        scenario: What is asked for.
        release: Whose code is called.
        unguarded: Whether the ring-size blocks of the three guards are skipped.
    """

    scenario: Scenario
    release: str
    unguarded: bool = False

    def since(self, release: str) -> bool:
        """Whether this release has what came with `release`."""
        return RELEASES.index(self.release) >= RELEASES.index(release)

    # -- mesh and shapes --------------------------------------------------------------------------

    @property
    def usp(self) -> bool:
        """USPAttention, not UlyssesAttention."""
        return self.scenario.attention.layer == "USPAttention"

    @property
    def ulysses(self) -> int:
        """U."""
        return self.scenario.mesh.ulysses

    @property
    def ring(self) -> int:
        """R."""
        return self.scenario.mesh.ring

    @property
    def world(self) -> int:
        """P, sglang's sequence-parallel world size."""
        return self.scenario.mesh.ranks

    @property
    def skip(self) -> bool:
        """``skip_sequence_parallel``."""
        return self.scenario.attention.skip_sequence_parallel

    @property
    def local(self) -> bool:
        """Whether the layer attends to what a rank holds, without communication."""
        return self.skip or self.world == 1

    @property
    def heads(self) -> int:
        """H."""
        return self.scenario.tensors.heads

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.scenario.kv_heads

    @property
    def batch(self) -> int:
        """B."""
        return self.scenario.tensors.batch

    @property
    def causal(self) -> bool:
        """The layer's flag."""
        return self.scenario.attention.causal

    @property
    def backend(self) -> str:
        """What the deployment runs: FA, TORCH_SDPA or SAGE_ATTN."""
        return self.scenario.attention.sglang_backend

    # -- rows -------------------------------------------------------------------------------------

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Sharded rows by position."""
        return self.scenario.shards

    @property
    def prefix(self) -> int:
        """Replicated leading rows."""
        return self.scenario.tokens.replicated.prefix

    @property
    def suffix(self) -> int:
        """Replicated trailing rows."""
        return self.scenario.tokens.replicated.suffix

    @property
    def kv_prefix(self) -> int:
        """Replicated leading rows of K and V only."""
        return self.scenario.tokens.replicated.kv_prefix

    @property
    def replicated_modes(self) -> int:
        """How many of the three kinds of replicated rows there are."""
        return sum(n > 0 for n in (self.prefix, self.suffix, self.kv_prefix))

    @property
    def uneven(self) -> bool:
        """Whether shards differ in length."""
        return len(set(self.lengths)) > 1

    def group(self, position: int) -> tuple[int, ...]:
        """Shard lengths of a position's own Ulysses group."""
        start = position // self.ulysses * self.ulysses
        return self.lengths[start : start + self.ulysses]

    def query_rows(self, position: int) -> int:
        """Rows of a rank's Q as a local call sees it."""
        return self.prefix + self.lengths[position] + self.suffix

    # -- seq_lens ---------------------------------------------------------------------------------

    @property
    def explicit(self) -> tuple[int, ...] | None:
        """The scenario's own list of seq_lens."""
        given = self.scenario.attention.seq_lens
        return given if isinstance(given, tuple) else None

    @property
    def has_seq_lens(self) -> bool:
        """Whether the layer gets seq_lens."""
        given = self.scenario.attention.seq_lens
        return given != "never" and (given != "auto" or self.uneven)

    def seq_lens(self, position: int) -> tuple[int, ...]:
        """The list that this rank hands over, where it hands one over.

        An explicit list with an entry for every position is cut to the rank's Ulysses group, which
        is what the argument means where ranks communicate.
        """
        if self.explicit is None:
            return self.group(position)
        if len(self.explicit) == self.world and not self.local:
            start = position // self.ulysses * self.ulysses
            return self.explicit[start : start + self.ulysses]
        return self.explicit

    @property
    def seq_lens_text(self) -> str:
        """All of them, for a message."""
        return str(list(self.lengths if self.explicit is None else self.explicit))

    # -- masks ------------------------------------------------------------------------------------

    @property
    def documents(self) -> bool:
        """Whether there are documents to keep apart."""
        return sum(n > 0 for n in self.scenario.documents) > 1

    @property
    def documents_as_seq_lens(self) -> bool:
        """Whether seq_lens are meant to say the documents."""
        return self.explicit is not None and self.explicit == self.scenario.tokens.documents

    @cached_property
    def tensor(self) -> Tensor:
        """The mask tensor that is handed over: none, a key mask [B, S_local], or 4D."""
        masks = self.scenario.attention.mask
        kinds = [next(iter(type(mask).model_fields)) for mask in masks]
        if any(kind in PAIR_MASKS for kind in kinds):
            return "pairs"
        if self.documents and not self.documents_as_seq_lens:
            return "pairs"
        return "keys" if any(isinstance(m, KeyMask) for m in masks) or len(masks) > 1 else "none"

    @cached_property
    def pad(self) -> tuple[int, int] | None:
        """The span [start, end) of rows that metadata alone calls padding."""
        masks = self.scenario.attention.mask
        if self.tensor != "none" or not masks:
            return None
        (mask,) = masks
        if isinstance(mask, TailPad):
            return mask.tail_pad.start, self.scenario.tokens.total
        return (mask.gap_pad.start, mask.gap_pad.end) if isinstance(mask, GapPad) else None

    @property
    def masked(self) -> bool:
        """Whether the call takes the masked path; metadata alone opens it only under SP."""
        return self.usp and (self.tensor != "none" or (self.pad is not None and not self.local))

    @property
    def unsayable(self) -> tuple[str, ...]:
        """What no argument of UlyssesAttention can say."""
        if self.usp:
            return ()
        found = {
            "a mask": bool(self.scenario.attention.mask),
            "packed documents": self.documents and not self.documents_as_seq_lens,
            "kv_prefix rows": self.kv_prefix > 0,
            "skip_sequence_parallel": self.skip,
        }
        return tuple(name for name, present in found.items() if present)
