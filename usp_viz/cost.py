"""What a plan costs: bytes, FLOPs, memory, and a timeline in the α-β model.

Bytes are those of the predicted events, so they must equal the recorded ones exactly. Memory counts
tensors that a lean implementation holds at the same time; times come from three numbers that the
caller gives (`Machine`) and are a model, not a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from usp_viz.layout import count
from usp_viz.plan import Plan, plan
from usp_viz.trace import Event, Trace

if TYPE_CHECKING:
    from usp_viz.scenario import Scenario

Lane = Literal["send", "compute", "wait"]


# -- bytes, FLOPs, memory --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """Tensor bytes of one rank.

    Attributes:
        inputs: Its Q, K and V, which the caller holds throughout.
        input_send, input_received: Staging of the input all-to-all; queries live on in the latter.
        buffers: The double KV buffer of the ring.
        accumulators: Output and log-sum-exp so far, in float32 (float64 for float64).
        block: Output and log-sum-exp of the block in hand.
        output_send, output_received: Staging of the output all-to-all.
        output: The finished output.
    """

    inputs: int
    input_send: int
    input_received: int
    buffers: int
    accumulators: int
    block: int
    output_send: int
    output_received: int
    output: int

    @property
    def peak(self) -> int:
        """The most that is held at once: in the input all-to-all, the ring, or the output."""
        swapping = self.inputs + self.input_send + self.input_received
        attending = (
            self.inputs + self.input_received + self.buffers + self.accumulators + self.block
        )
        finishing = (
            self.inputs + self.accumulators + self.output_send + self.output_received + self.output
        )
        return max(swapping, attending, finishing)


@dataclass(frozen=True, slots=True)
class RankCost:
    """What one rank spends.

    Attributes:
        rank: Which.
        sent: Bytes sent to other ranks.
        received: Bytes received from them.
        pairs: (query, key) pairs computed, over batch rows and query heads.
        flops: 4·D a pair: 2·D for Q·K and 2·D for P·V.
        memory: Tensor bytes.
    """

    rank: int
    sent: int
    received: int
    pairs: int
    flops: int
    memory: Memory


@dataclass(frozen=True)
class Cost:
    """What all ranks spend.

    Attributes:
        ranks: Each rank.
        links: Bytes from rank to rank.
    """

    ranks: tuple[RankCost, ...]
    links: dict[tuple[int, int], int]

    @cached_property
    def imbalance(self) -> float:
        """Pairs of the busiest rank over the mean; 1 is balanced, and so is no work at all."""
        pairs = [rank.pairs for rank in self.ranks]
        return max(pairs) * len(pairs) / sum(pairs) if any(pairs) else 1.0


def cost(scenario: Scenario) -> Cost:
    """Bytes, FLOPs and memory of a scenario's plan."""
    program = plan(scenario)
    trace = program.trace
    received, pairs = [0] * trace.ranks, [0] * trace.ranks
    for event in trace.events():
        received[event.dst] += event.bytes
        pairs[event.src] += event.pairs
    ranks = tuple(
        RankCost(
            rank=rank,
            sent=trace.bytes_sent(rank),
            received=received[rank],
            pairs=pairs[rank],
            flops=4 * program.tensors.head_dim * pairs[rank],
            memory=memory(program, rank),
        )
        for rank in range(trace.ranks)
    )
    return Cost(ranks, trace.links)


def peak_bytes(program: Plan) -> tuple[int, ...]:
    """The most tensor bytes that each rank holds at once."""
    return tuple(memory(program, rank).peak for rank in range(program.mesh.ranks))


def memory(program: Plan, rank: int) -> Memory:
    """Tensor bytes of one rank."""
    tensors, row = program.tensors, program.tensors.row_bytes
    position, place = program.mesh.position(rank), program.place(rank)
    ulysses = program.mesh.at(rank)[1]
    h, g = len(program.query_heads[ulysses]), len(program.key_heads[ulysses])
    own = count(program.own_queries[position])
    queries = count(program.queries[place])
    wide = max(tensors.itemsize, 4)
    lse = queries * h * tensors.batch * wide
    travels = len(program.hops) > 1
    largest = max(map(count, program.travelling)) if travels else 0
    input_send = input_received = output_send = output_received = 0
    if program.swaps:
        group = tuple(map(program.mesh.position, program.mesh.ulysses_group(place)))
        for rows, each, all_heads in (
            (program.swapped_queries, 1, program.query_heads),
            (program.swapped_keys, 2, program.key_heads),
        ):
            input_send += each * row * count(rows[position]) * sum(map(len, all_heads))
            received = sum(count(rows[peer]) for peer in group)
            input_received += each * row * received * len(all_heads[ulysses])
        output_send = sum(count(program.own_queries[peer]) for peer in group) * h * row
        output_received = own * tensors.heads * row
    return Memory(
        inputs=(own * tensors.heads + 2 * count(program.own_keys[position]) * tensors.kv_heads)
        * row,
        input_send=input_send,
        input_received=input_received,
        buffers=2 * largest * 2 * g * row,
        accumulators=queries * h * (row // tensors.itemsize * wide) + lse,
        block=queries * h * row + lse,
        output_send=output_send,
        output_received=output_received,
        output=own * tensors.heads * row,
    )


# -- time ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """The α-β model: a message of n bytes takes latency_s + n / bytes_per_s seconds.

    Attributes:
        latency_s: α, seconds a message.
        bytes_per_s: 1/β, bytes a second on every link.
        flops_per_s: What a rank computes in a second.
    """

    latency_s: float
    bytes_per_s: float
    flops_per_s: float

    def message(self, size: int) -> float:
        """Seconds for one message."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Segment:
    """A rank does one thing from `start` to `stop`, seconds from the beginning."""

    rank: int
    lane: Lane
    start: float
    stop: float
    step: int
    stage: str


@dataclass(frozen=True)
class Timeline:
    """Lanes of all ranks; `wait` is when a rank neither computes nor is in an all-to-all."""

    ranks: int
    segments: tuple[Segment, ...]

    @cached_property
    def makespan(self) -> float:
        """Seconds until the last rank is done."""
        return max((segment.stop for segment in self.segments), default=0.0)

    def total(self, lane: Lane) -> tuple[float, ...]:
        """Seconds that each rank spends in a lane."""
        seconds = [0.0] * self.ranks
        for segment in self.segments:
            if segment.lane == lane:
                seconds[segment.rank] += segment.stop - segment.start
        return tuple(seconds)


def timeline(trace: Trace, head_dim: int, machine: Machine, overlap: bool = True) -> Timeline:
    """When each rank sends, computes and waits.

    An all-to-all starts when all who take part are there and sends one message to each peer, one
    after the other. A hop's KV message starts when sender and receiver are there; with `overlap`
    it travels while both compute, else after both have computed. Merging takes no time.

    Args:
        trace: What happens.
        head_dim: D, for FLOPs.
        machine: The model's numbers.
        overlap: Whether the next hop's KV travels while this one is attended.
    """
    clock = _Clock(trace.ranks, head_dim, machine, overlap)
    for number in range(trace.steps):
        events = trace.step(number)
        if any(event.op == "all_to_all" for event in events):
            clock.all_to_all(events)
        elif any(event.op in ("send", "attend") for event in events):
            clock.hop(events)
    return Timeline(trace.ranks, tuple(clock.segments))


class _Clock:
    """Each rank's own time, moved on by one step after the other."""

    def __init__(self, ranks: int, head_dim: int, machine: Machine, overlap: bool) -> None:
        self.now = [0.0] * ranks
        self.segments: list[Segment] = []
        self._flops_per_pair = 4 * head_dim
        self._machine = machine
        self._overlap = overlap

    def all_to_all(self, events: Sequence[Event]) -> None:
        sizes: dict[tuple[int, int], int] = {}
        peers: dict[int, set[int]] = {}
        for event in events:
            peers.setdefault(event.src, {event.src}).add(event.dst)
            peers.setdefault(event.dst, {event.dst}).add(event.src)
            if event.src != event.dst:
                link = (event.src, event.dst)
                sizes[link] = sizes.get(link, 0) + event.bytes
        sending = dict.fromkeys(peers, 0.0)
        for (src, _), size in sizes.items():
            sending[src] += self._machine.message(size)
        start = {rank: max(self.now[peer] for peer in peers[rank]) for rank in peers}
        done = {rank: start[rank] + sending[rank] for rank in peers}
        for rank, others in peers.items():
            end = max(done[peer] for peer in others)
            self._add(rank, "wait", self.now[rank], start[rank], events)
            self._add(rank, "send", start[rank], done[rank], events)
            self._add(rank, "wait", done[rank], end, events)
            self.now[rank] = end

    def hop(self, events: Sequence[Event]) -> None:
        computed = list(self.now)
        for event in events:
            if event.op == "attend":
                seconds = event.pairs * self._flops_per_pair / self._machine.flops_per_s
                computed[event.src] += seconds
                self._add(event.src, "compute", self.now[event.src], computed[event.src], events)
        ready = self.now if self._overlap else computed
        end = list(computed)
        for event in events:
            if event.op == "send":
                start = max(ready[event.src], ready[event.dst])
                stop = start + self._machine.message(event.bytes)
                self._add(event.src, "send", start, stop, events)
                for rank in (event.src, event.dst):
                    end[rank] = max(end[rank], stop)
        for rank, stop in enumerate(end):
            self._add(rank, "wait", computed[rank], stop, events)
        self.now = end

    def _add(
        self, rank: int, lane: Lane, start: float, stop: float, events: Iterable[Event]
    ) -> None:
        if stop > start:
            event = next(iter(events))
            self.segments.append(Segment(rank, lane, start, stop, event.step, event.stage))
