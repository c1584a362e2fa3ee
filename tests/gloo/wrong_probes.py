"""Wrong implementations: each mistake is patched into a rank process for the time of one run.

A test runs ``tests.gloo.wrong_probes:run`` with the name of a mistake and looks at the verdict.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from usp_viz.attention import ids, inputs, local, usp
from usp_viz.attention.comm import Comm
from usp_viz.attention.schedule import Schedule
from usp_viz.engines import builtin
from usp_viz.layout import Layout
from usp_viz.mask import Visibility
from usp_viz.mesh import Mesh
from usp_viz.scenario import Scenario

MISTAKES: dict[str, Callable[[int], AbstractContextManager[None]]] = {}
ATTENTIONS = (ids.IdAttention, local.KernelAttention)


def run(ctx: Any, payload: dict[str, Any]) -> Any:
    """Run a scenario with a mistake."""
    with MISTAKES[payload["mistake"]](ctx.rank):
        result = builtin.run_rank(ctx, {"scenario": payload["scenario"]})
    if payload["mistake"] == "not_even_a_result":
        return "done"
    if payload["mistake"] == "no_output_at_all":
        return dataclasses.replace(result, out=None)
    return result


def mistake(body: Callable[[int], Iterator[None]]) -> Callable[[int], Iterator[None]]:
    MISTAKES[body.__name__] = contextmanager(body)
    return body


@mistake
def none(rank: int) -> Iterator[None]:
    yield


MISTAKES["not_even_a_result"] = MISTAKES["no_output_at_all"] = MISTAKES["none"]  # see `run`


# -- the softmax ---------------------------------------------------------------------------------


def _kernel(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    right = local.block_attention

    def wrong(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return change(*right(*args, **options))

    return patch.object(local, "block_attention", wrong)


@mistake
def dead_rows_weigh_one(rank: int) -> Iterator[None]:
    """What torch's op returns for a row that sees nothing: log-sum-exp 0."""
    with _kernel(lambda out, lse: (out, lse.masked_fill(lse == -math.inf, 0.0))):
        yield


@mistake
def lse_in_base_two(rank: int) -> Iterator[None]:
    with _kernel(lambda out, lse: (out, lse / math.log(2))):
        yield


@mistake
def no_lse(rank: int) -> Iterator[None]:
    with _kernel(lambda out, lse: (out, torch.zeros_like(lse))):
        yield


@mistake
def scores_not_scaled(rank: int) -> Iterator[None]:
    right = local.block_attention

    def wrong(q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return right(q * q.shape[-1] ** 0.5, *args, **options)

    with patch.object(local, "block_attention", wrong):
        yield


@mistake
def nan_in_one_row(rank: int) -> Iterator[None]:
    right = local.KernelAttention.output

    def wrong(self: Any) -> Tensor:
        out = right(self)
        out[0, 0] = math.nan
        return out

    with patch.object(local.KernelAttention, "output", wrong):
        yield


def _merge(wrong: Callable[..., None]) -> Any:
    return patch.object(local, "merge_", wrong)


@mistake
def merge_weights_swapped(rank: int) -> Iterator[None]:
    def wrong(acc: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        merged = torch.logaddexp(acc_lse, lse)
        weight = torch.exp(acc_lse - merged).nan_to_num(0.0).unsqueeze(-1)
        acc.lerp_(out.to(acc.dtype), weight)
        acc_lse.copy_(merged)

    with _merge(wrong):
        yield


@mistake
def outputs_added_up(rank: int) -> Iterator[None]:
    def wrong(acc: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        acc += out.to(acc.dtype)

    with _merge(wrong):
        yield


@mistake
def lse_not_carried_on(rank: int) -> Iterator[None]:
    """Right for two blocks, wrong from the third on."""
    right = local.merge_

    def wrong(acc: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        before = acc_lse.clone()
        right(acc, acc_lse, out, lse)
        acc_lse.copy_(torch.maximum(before, lse))

    with _merge(wrong):
        yield


# -- the ring ------------------------------------------------------------------------------------


@mistake
def last_hop_dropped(rank: int) -> Iterator[None]:
    right: Any = Schedule.hops
    with patch.object(Schedule, "hops", property(lambda self: right.func(self)[:-1])):
        yield


@mistake
def ring_turned_round(rank: int) -> Iterator[None]:
    """KV from the next position instead of the one before: each block still meets each query."""
    right = Comm.post_shift

    def wrong(self: Any, step: int, stage: str, distance: int, *rest: Any) -> Any:
        return right(self, step, stage, -distance, *rest)

    def ring(replicated: Any, kv: Any, schedule: Schedule, comm: Comm, attention: Any) -> None:
        size = schedule.mesh.ring
        turned = dataclasses.replace(
            schedule.layout, shards=_ring_positions(schedule, lambda r: -r % size)
        )
        mirrored = _Mirrored(schedule, turned)
        _RING(replicated, kv, mirrored, comm, attention)

    with patch.object(Comm, "post_shift", wrong), patch.object(usp, "_ring", ring):
        yield


_RING = usp._ring


def _ring_positions(schedule: Schedule, where: Callable[[int], int]) -> Any:
    shards, u = schedule.layout.shards, schedule.mesh.ulysses
    return tuple(
        rows
        for r in range(schedule.mesh.ring)
        for rows in shards[where(r) * u : (where(r) + 1) * u]
    )


class _Mirrored:
    """A schedule seen in a mirror: ring position r is called -r."""

    def __init__(self, schedule: Schedule, layout: Layout) -> None:
        self._schedule, self.layout = schedule, layout
        self.ring = -schedule.ring % schedule.mesh.ring

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def queries(self, ring: int) -> Any:
        return self._schedule.queries(self._schedule.ring)


@mistake
def kv_travels_in_float64(rank: int) -> Iterator[None]:
    """Right, and twice the bytes; the pass on ids cannot know."""
    buffer: Any = usp._DoubleBuffer
    init, views = buffer.__init__, buffer.views

    def wide(self: Any, kv: Any, schedule: Schedule) -> None:
        init(self, tuple(t.double() if t.is_floating_point() else t for t in kv), schedule)

    def narrow(self: Any, source: int) -> Any:
        return tuple(t.float() if t.is_floating_point() else t for t in views(self, source))

    with patch.object(buffer, "__init__", wide), patch.object(buffer, "views", narrow):
        yield


@mistake
def v_of_the_hop_before(rank: int) -> Iterator[None]:
    held: dict[int, Tensor] = {}

    def wrong(right: Any) -> Any:
        def attend(self: Any, step: int, stage: str, k: Tensor, v: Tensor, pieces: Any) -> None:
            before = held.get(id(self), v)
            held[id(self)] = v.clone()
            right(self, step, stage, k, before if before.shape == v.shape else v, pieces)

        return attend

    with _on_both("attend", wrong):
        yield


@contextmanager
def _on_both(name: str, wrong: Callable[[Any], Any]) -> Iterator[None]:
    first, second = ATTENTIONS
    with (
        patch.object(first, name, wrong(getattr(first, name))),
        patch.object(second, name, wrong(getattr(second, name))),
    ):
        yield


@mistake
def replicated_keys_at_every_hop(rank: int) -> Iterator[None]:
    """Text counted once for each ring position, as one release does."""
    right = usp._ring

    def ring(replicated: Any, kv: Any, schedule: Schedule, comm: Comm, attention: Any) -> None:
        done, keys = type(attention).hop_done, schedule.replicated_keys()

        def again(self: Any, hop: Any) -> None:
            if hop.distance:
                queries = schedule.queries(schedule.ring)
                pieces = usp.block_pieces(schedule.visibility, queries, keys)
                self.attend(hop.step, f"hop {hop.distance}", *replicated, pieces)
            done(self, hop)

        with patch.object(type(attention), "hop_done", again):
            right(replicated, kv, schedule, comm, attention)

    with patch.object(usp, "_ring", ring):
        yield


# -- who holds what ------------------------------------------------------------------------------


@mistake
def inputs_shifted_by_one(rank: int) -> Iterator[None]:
    """The real tensors hold the rows after those that they should."""
    right = inputs.make

    def wrong(scenario: Scenario, tensor: Any, rows: Any) -> Any:
        size = Layout.of(scenario).order.size
        return right(scenario, tensor, (rows + 1) % size if tensor == "k" else rows)

    with patch.object(inputs, "make", wrong):
        yield


@mistake
def shards_shifted_by_one(rank: int) -> Iterator[None]:
    """Every shard begins one row later, round the end: sizes are right, rows are not."""
    right = Layout.of

    def wrong(scenario: Scenario) -> Layout:
        layout = right(scenario)
        order = layout.order
        shards = []
        for rows in layout.shards:
            (run,) = rows
            if run.stop < order.stop:
                shards.append((range(run.start + 1, run.stop + 1),))
            else:
                shards.append((range(run.start + 1, run.stop), range(order.start, order.start + 1)))
        return dataclasses.replace(layout, shards=tuple(shards))

    with patch.object(Layout, "of", staticmethod(wrong)):
        yield


@mistake
def shards_of_other_sizes(rank: int) -> Iterator[None]:
    """The ranks agree among themselves that the first holds one row more."""
    right = Layout.of

    def wrong(scenario: Scenario) -> Layout:
        first, second, *rest = scenario.shards
        moved = [first + 1, second - 1, *rest]
        tokens = scenario.tokens.model_copy(update={"shards": tuple(moved)})
        return right(scenario.model_copy(update={"tokens": tokens}))

    with patch.object(Layout, "of", staticmethod(wrong)):
        yield


@mistake
def keys_of_another_position(rank: int) -> Iterator[None]:
    """Rank order forgotten for K and V: without a mask no number tells."""

    def wrong(self: Schedule) -> Any:
        ring, ulysses = self.mesh.at(self.rank)
        return self.layout.keys(ulysses * self.mesh.ring + ring)

    with patch.object(Schedule, "own_keys", property(wrong)):
        yield


@mistake
def rank_order_ignored(rank: int) -> Iterator[None]:
    right = Mesh.of

    def wrong(scenario: Scenario) -> Mesh:
        return dataclasses.replace(right(scenario), order="ulysses-inner")

    with patch.object(Mesh, "of", staticmethod(wrong)):
        yield


@mistake
def groups_swapped(rank: int) -> Iterator[None]:
    """The all-to-all over the ring's group, the ring over the Ulysses group."""
    right = Comm.__init__

    def wrong(self: Any, mesh: Any, me: int, ulysses: Any, ring: Any, recorder: Any) -> None:
        right(self, mesh, me, ring, ulysses, recorder)

    with patch.object(Comm, "__init__", wrong):
        yield


@mistake
def all_to_all_over_the_ring_group(rank: int) -> Iterator[None]:
    right = Comm.__init__

    def wrong(self: Any, mesh: Any, me: int, ulysses: Any, ring: Any, recorder: Any) -> None:
        right(self, mesh, me, ring, ring, recorder)

    with patch.object(Comm, "__init__", wrong):
        yield


# -- heads and batch rows ------------------------------------------------------------------------


def _gathered_kv(change: Callable[[Tensor], Tensor]) -> Any:
    right = usp._scatter_heads

    def wrong(*args: Any) -> Any:
        q, replicated, (k, v) = right(*args)
        return q, replicated, (change(k), change(v))

    return patch.object(usp, "_scatter_heads", wrong)


@mistake
def kv_heads_swapped(rank: int) -> Iterator[None]:
    with _gathered_kv(lambda t: t.flip(2)):
        yield


@mistake
def batch_rows_mixed(rank: int) -> Iterator[None]:
    with _gathered_kv(lambda t: t.flip(0)):
        yield


@mistake
def heads_of_its_own_only(rank: int) -> Iterator[None]:
    """The second all-to-all is forgotten."""
    with patch.object(usp, "_gather_heads", lambda out, schedule, comm: out[:, :8]):
        yield


@mistake
def output_heads_swapped(rank: int) -> Iterator[None]:
    right = usp._gather_heads

    def wrong(*args: Any) -> Tensor:
        return right(*args).flip(2)

    with patch.object(usp, "_gather_heads", wrong):
        yield


# -- who may see whom ----------------------------------------------------------------------------


def _visibility(change: Callable[[Visibility], Visibility]) -> Any:
    right = Visibility.of
    return patch.object(Visibility, "of", staticmethod(lambda scenario: change(right(scenario))))


@mistake
def causal_off_by_one(rank: int) -> Iterator[None]:
    """A query does not see itself."""
    right = Visibility.interval

    def wrong(self: Visibility, queries: Any) -> Any:
        lo, hi = right(self, queries)
        return lo, hi - 1

    with patch.object(Visibility, "interval", wrong):
        yield


@mistake
def causal_by_local_index(rank: int) -> Iterator[None]:
    """A triangle in every block that is cut at all, as if its rows began where the keys do."""
    right = usp.block_pieces

    def wrong(visibility: Visibility, queries: Any, keys: Any) -> Any:
        dense = dataclasses.replace(visibility, causal=False)
        return tuple(
            dataclasses.replace(piece, causal=True) for piece in right(dense, queries, keys)
        )

    with patch.object(usp, "block_pieces", wrong):
        yield


@mistake
def padding_ignored(rank: int) -> Iterator[None]:
    with _visibility(lambda see: dataclasses.replace(see, valid=())):
        yield


@mistake
def documents_ignored(rank: int) -> Iterator[None]:
    with _visibility(lambda see: dataclasses.replace(see, borders=())):
        yield


@mistake
def window_one_wider(rank: int) -> Iterator[None]:
    with _visibility(lambda see: dataclasses.replace(see, left=see.left + 1)):
        yield


@mistake
def dense_mask_transposed(rank: int) -> Iterator[None]:
    right = Visibility.allowed

    def wrong(self: Visibility, queries: Any, keys: Any, batch_row: int) -> Any:
        return right(self, keys, queries, batch_row).T

    with patch.object(Visibility, "allowed", wrong):
        yield


# -- ranks that part ways ------------------------------------------------------------------------


@mistake
def one_rank_skips_a_collective(rank: int) -> Iterator[None]:
    """It looks at its own rows, finds nothing to do, and goes on: the others wait for it."""
    right = Comm.all_to_all

    def wrong(self: Any, step: int, stage: str, send: Any, sent: Any, counts: Any) -> Any:
        if rank == 1 and stage == usp.OUTPUT:
            received = send.new_empty(sum(counts))
            return received, list(received.split(list(counts)))
        return right(self, step, stage, send, sent, counts)

    with patch.object(Comm, "all_to_all", wrong):
        yield


@mistake
def one_rank_counts_wrong(rank: int) -> Iterator[None]:
    right = Comm.all_to_all

    def wrong(self: Any, step: int, stage: str, send: Any, sent: Any, counts: Any) -> Any:
        if rank == 1:
            sent = [sent[0] + 1, sent[1] - 1, *sent[2:]]
        return right(self, step, stage, send, sent, counts)

    with patch.object(Comm, "all_to_all", wrong):
        yield


@mistake
def one_rank_raises(rank: int) -> Iterator[None]:
    def wrong(*_: Any) -> None:
        raise ValueError("not on my rank")

    if rank == 1:
        with patch.object(usp, "_ring", wrong):
            yield
    else:
        yield


@mistake
def one_rank_is_killed(rank: int) -> Iterator[None]:
    def wrong(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        with patch.object(usp, "_ring", wrong):
            yield
    else:
        yield
