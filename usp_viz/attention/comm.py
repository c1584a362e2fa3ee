"""The collectives of one rank, and the log of them.

Two kinds of calls exist: one packed all-to-all inside a Ulysses group, and a shift of KV along the
ring whose send and receive are posted before they are waited for. Both run on any backend that
torch.distributed has for the tensors at hand (gloo for CPU, NCCL for CUDA).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from usp_viz.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Received:
    """What arrived in one collective, for whoever keeps the log.

    Attributes:
        step: Step number of the trace.
        stage: Its name.
        op: ``all_to_all`` or ``send``.
        src, dst: Ranks.
        payload: The received elements, flat.
    """

    step: int
    stage: str
    op: str
    src: int
    dst: int
    payload: Tensor


class Recorder(Protocol):
    """Keeps the log of a rank's run; `IdRecorder` reads payloads, `TimeRecorder` clocks."""

    def entering(self, step: int, stage: str, op: str) -> None:
        """About to block in, or to start, something that others wait for."""
        ...

    def received(self, event: Received) -> None:
        """Something arrived."""
        ...

    def lane(self, step: int, what: str, start: float, stop: float) -> None:
        """Spent [start, stop) seconds of the monotonic clock on `what`."""
        ...


@dataclass
class Comm:
    """Collectives of one rank on the mesh.

    Attributes:
        mesh: Who sits where.
        rank: This rank.
        ulysses_group, ring_group: Process groups, None where the degree is 1.
        recorder: The log.
    """

    mesh: Mesh
    rank: int
    ulysses_group: Any
    ring_group: Any
    recorder: Recorder

    def all_to_all(
        self,
        step: int,
        stage: str,
        send: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Swap parts of a flat tensor inside the Ulysses group, in one collective.

        Args:
            step: Step number of the trace.
            stage: Its name.
            send: Flat, contiguous; the parts for each Ulysses index one behind the other.
            send_counts: Elements to send to each.
            receive_counts: Elements to receive from each.

        Returns:
            The flat received buffer, and its parts by sender as views.
        """
        self.recorder.entering(step, stage, "all_to_all")
        start = time.perf_counter()
        received = send.new_empty(sum(receive_counts))
        counts = list(receive_counts)
        dist.all_to_all_single(received, send, counts, list(send_counts), group=self.ulysses_group)
        self.recorder.lane(step, "all_to_all", start, time.perf_counter())
        parts = list(received.split(counts))
        ring, _ = self.mesh.at(self.rank)
        for index, part in enumerate(parts):
            src = self.mesh.rank(ring, index)
            self.recorder.received(Received(step, stage, "all_to_all", src, self.rank, part))
        return received, parts

    def post_shift(
        self, step: int, stage: str, distance: int, send: Tensor, receive: Tensor
    ) -> Shift:
        """Start sending `send` `distance` ring positions on, and receiving into `receive`.

        Both tensors are contiguous; either may be empty, and is then neither sent nor received: the
        other side knows that from the scenario.
        """
        ring, ulysses = self.mesh.at(self.rank)
        to = self.mesh.rank((ring + distance) % self.mesh.ring, ulysses)
        source = self.mesh.rank((ring - distance) % self.mesh.ring, ulysses)
        self.recorder.entering(step, stage, "send")
        ops = [
            dist.P2POp(call, tensor, peer, group=self.ring_group)
            for call, tensor, peer in ((dist.isend, send, to), (dist.irecv, receive, source))
            if tensor.numel()
        ]
        if not ops:
            works: list[Any] = []
        elif send.is_cuda:  # NCCL must see both at once, or two ranks wait for each other
            works = dist.batch_isend_irecv(ops)
        else:
            works = [op.op(op.tensor, op.peer, group=op.group) for op in ops]
        return Shift(self, step, stage, source, receive, works)


@dataclass
class Shift:
    """A posted send and receive."""

    comm: Comm
    step: int
    stage: str
    source: int
    buffer: Tensor
    works: list[Any]

    def wait(self) -> None:
        """Block until both are done."""
        recorder = self.comm.recorder
        recorder.entering(self.step, self.stage, "wait")
        start = time.perf_counter()
        for work in self.works:
            work.wait()
        recorder.lane(self.step, "wait", start, time.perf_counter())
        if self.buffer.numel():
            recorder.received(
                Received(self.step, self.stage, "send", self.source, self.comm.rank, self.buffer)
            )
