"""What a run cost beside what was predicted: when each rank did what, bytes sent, memory.

Bytes and memory are predicted from the plan, times by the α-β model of `usp_viz.cost`, whose three
numbers are set from the run itself: so the model says how the ranks should share the time, not how
fast the machine is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from usp_viz.cost import Cost, Machine, Timeline, cost, timeline
from usp_viz.plan import simulate
from usp_viz.runtime.result import Run

KINDS = {
    "attend": "compute",
    "merge": "compute",
    "pack": "copy",
    "unpack": "copy",
    "all_to_all": "send",
    "send": "send",
    "wait": "wait",
}
"""What a recorded lane's time goes into; ``all_to_all`` includes waiting for the peers."""
BYTES_PER_S = 1e9
"""The model's bandwidth: on loopback the bytes of a picture cost little beside the latency."""
DEFAULT = Machine(latency_s=5e-4, bytes_per_s=BYTES_PER_S, flops_per_s=1e9)


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """A rank did one thing from `start` to `stop`, seconds.

    Attributes:
        rank, step: Whose, and at which step of the trace.
        kind: compute, copy, send or wait.
        what: As recorded: attend, all_to_all, pack …
    """

    rank: int
    step: int
    kind: str
    what: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True, eq=False)
class Spent:
    """Measured beside predicted, by rank.

    Attributes:
        stages: Name of each step.
        measured, predicted: Lanes of all ranks.
        machine: The model's numbers.
        sent, sent_predicted: Bytes sent to other ranks.
        memory: Peak tensor bytes; empty where they were not measured.
        memory_predicted: What the plan holds at once.
    """

    stages: tuple[str, ...]
    measured: tuple[Lane, ...]
    predicted: tuple[Lane, ...]
    machine: Machine
    sent: tuple[int, ...]
    sent_predicted: tuple[int, ...]
    memory: tuple[int, ...]
    memory_predicted: tuple[int, ...]

    @staticmethod
    def of(run: Run) -> Spent:
        """What a run cost; one without output has only what it sent until then."""
        scenario, trace = run.scenario, simulate(run.scenario)
        if run.accuracy is None:
            sent = run.trace.bytes_sent_per_rank
            return Spent(trace.stages, (), (), DEFAULT, sent, trace.bytes_sent_per_rank, (), ())
        spent = cost(scenario)
        machine = _machine(run, spent)
        model = timeline(trace, scenario.tensors.head_dim, machine)
        return Spent(
            stages=trace.stages,
            measured=tuple(_measured(run)),
            predicted=tuple(_modelled(model)),
            machine=machine,
            sent=run.trace.bytes_sent_per_rank,
            sent_predicted=tuple(rank.sent for rank in spent.ranks),
            memory=tuple(run.peak_bytes[rank] for rank in sorted(run.peak_bytes)),
            memory_predicted=tuple(rank.memory.peak for rank in spent.ranks),
        )

    @property
    def machine_text(self) -> str:
        """The model in one sentence."""
        m = self.machine
        return (
            f"α-β model: {m.latency_s * 1e3:.2g} ms a message, {m.bytes_per_s / 1e9:.2g} GB/s, "
            f"{m.flops_per_s / 1e9:.2g} GFLOP/s; latency and FLOP rate set from this run"
        )

    def to_json(self) -> dict[str, Any]:
        """Lanes as [rank, step, kind, what, start, stop], in whole microseconds."""
        return {
            "stages": list(self.stages),
            "machine": self.machine_text,
            "measured": [_flat(lane) for lane in self.measured],
            "predicted": [_flat(lane) for lane in self.predicted],
            "sent": {"measured": list(self.sent), "predicted": list(self.sent_predicted)},
            "memory": {"measured": list(self.memory), "predicted": list(self.memory_predicted)},
        }


def _flat(lane: Lane) -> list[Any]:
    start, stop = round(lane.start * 1e6), round(lane.stop * 1e6)
    return [lane.rank, lane.step, lane.kind, lane.what, start, stop]


def _measured(run: Run) -> list[Lane]:
    return [
        Lane(rank, step, KINDS.get(what, "wait"), what, start, stop)
        for rank, lanes in sorted(run.lanes.items())
        for step, what, start, stop in lanes
    ]


def _modelled(model: Timeline) -> list[Lane]:
    return [
        Lane(s.rank, s.step, s.lane, s.lane, s.start, s.stop)
        for s in sorted(model.segments, key=lambda s: (s.rank, s.start))
    ]


def _machine(run: Run, spent: Cost) -> Machine:
    """The model's numbers for this run: its mean FLOP rate, its fastest all-to-all or hop."""
    lanes = [lane for of_rank in run.lanes.values() for lane in of_rank]
    busy = sum(stop - start for _, what, start, stop in lanes if what == "attend")
    flops = sum(rank.flops for rank in spent.ranks)
    peers = max(run.scenario.mesh.ulysses - 1, 1)
    swaps = [(stop - start) / peers for _, what, start, stop in lanes if what == "all_to_all"]
    waits = [stop - start for _, what, start, stop in lanes if what == "wait"]
    fastest = min(swaps, default=sum(waits) / len(waits) if waits else 0.0)
    return Machine(
        latency_s=fastest or DEFAULT.latency_s,
        bytes_per_s=BYTES_PER_S,
        flops_per_s=flops / busy if busy and flops else DEFAULT.flops_per_s,
    )
