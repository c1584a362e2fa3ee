"""Warm rank processes: started once, kept, thrown away when a run leaves them in doubt."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from usp_viz.errors import InvalidScenario
from usp_viz.runtime.limits import limits
from usp_viz.runtime.report import Job, RunReport, Status, raise_what_is_missing
from usp_viz.runtime.server import ForkServer
from usp_viz.runtime.turns import Turns
from usp_viz.runtime.wire import encode
from usp_viz.runtime.world import World

OnMessage = Callable[[int, Any], None]

START_LIMIT_S = 60.0  # importing torch takes seconds, on a loaded machine many
GRACE_S = 1.0  # once a rank has failed, how long the silence of the others may last
REAP_LIMIT_S = 1.0  # what is killed is gone in milliseconds, unless the kernel holds it

# Imported once instead of by every rank: torch, and what the built-in engine imports when it runs.
ALWAYS_PRELOADED = (
    "usp_viz.runtime.rank",
    "usp_viz.engines.builtin",
    "usp_viz.engines.passes",
    "usp_viz.engines.release",
    "usp_viz.attention.sglang",
    "usp_viz.attention.usp",
)

_ENTRY = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*", re.ASCII)


_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


class RankPool:
    """Runs jobs on rank processes: one job at a time, first come, first served.

    A world stays warm after a run; the least recently used ones go when ranks would exceed
    ``USP_VIZ_MAX_RANKS``. Several threads may use one pool, and a process forked from this one
    starts ranks of its own. Nothing outlives the process that owns the pool, however that ends.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """A pool; processes start with the first run.

        Args:
            preload: Modules imported before ranks are forked. Jobs may name them, as they may
                name everything inside ``usp_viz``.
        """
        self._preload = tuple(preload)
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._turns = Turns()
        self._server: ForkServer | None = None
        self._worlds: dict[tuple[int, str], World] = {}  # the least recently used first
        self._guard = threading.Lock()  # over the next two
        self._rope: socket.socket | None = None  # rings the bell of the run at hand
        self._cancelled = False

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        job: Job,
        *,
        world: int,
        timeout_s: float,
        device: str = "cpu",
        on_message: OnMessage | None = None,
    ) -> RunReport:
        """Run `job` on every rank of a world and say what became of each.

        Once a rank has raised or died, the others may still report, until none has for `GRACE_S`.

        Args:
            job: What to call, with what.
            world: How many ranks.
            timeout_s: When to give up, from when all ranks stand ready.
            device: ``cpu``, ``cuda``, or ``auto``: CUDA if every rank gets a GPU of its own.
            on_message: Called as ``on_message(rank, message)`` in this thread, for what the ranks
                emit while they run. If it raises, the run is abandoned.

        Raises:
            ValueError: The job's entry is not one that ranks may call.
            InvalidScenario: More ranks than the cap.
            MissingRequirement: The ranks cannot start: this machine lacks something.
            RuntimeError: The ranks cannot start for another reason.
        """
        self._check(job, world)
        frame = encode((job.entry, job.payload))
        hear = on_message or (lambda rank, message: None)
        with self._turn() as bell:
            begun = time.monotonic()
            crew = self._crew(world, device)
            warm = crew.ready
            try:
                end = self._attend(crew, bell, hear, _standing, begun + START_LIMIT_S)
                sent = time.monotonic()
                if crew.ready:
                    crew.start(frame)
                    end = self._attend(crew, bell, hear, _finished, sent + timeout_s)
                crew.end(end)
                ended = time.monotonic()
            finally:
                if not crew.reusable:
                    self._discard(crew)
            reports = tuple(rank.report(sent) for rank in crew.ranks)
        if not crew.ready:
            raise_what_is_missing(reports)
        return RunReport(
            ranks=reports,
            wall_ms=(ended - sent) * 1e3,
            cold_start_ms=None if warm else (sent - begun) * 1e3,
        )

    def start(self) -> None:
        """Begin to import torch in the background, so that the first run finds it imported."""
        with self._turns:
            self._serve()

    def cancel(self) -> None:
        """End the run at hand, if there is one; for another thread to call."""
        with self._guard:
            if self._rope:
                self._cancelled = True
                self._rope.send(b"!")

    def close(self) -> None:
        """Cancel the run at hand and end every process. A later run starts new ones."""
        self.cancel()
        with self._turns:
            self._forget()

    def _forget(self) -> None:
        for crew in self._worlds.values():
            crew.disconnect()
        self._worlds.clear()
        if self._server:
            self._server.close()
            self._server = None

    def _check(self, job: Job, world: int) -> None:
        match = _ENTRY.fullmatch(job.entry)
        if not match or not (match[1].startswith("usp_viz.") or match[1] in self._preload):
            raise ValueError(
                f"job entry {job.entry!r}: ranks call `package.module:function` inside usp_viz"
                + "".join(f" or {module}" for module in self._preload)
            )
        cap = limits().max_ranks
        if not 1 <= world <= cap:
            raise InvalidScenario(
                "mesh", world, f"a run has 1 to {cap} ranks (USP_VIZ_MAX_RANKS)", [cap]
            )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[socket.socket]:
        """Wait for our turn; gives the bell that `cancel` rings meanwhile."""
        bell, rope = socket.socketpair()
        with bell, rope, self._turns:
            with self._guard:
                self._rope, self._cancelled = rope, False
            try:
                yield bell
            finally:
                with self._guard:
                    self._rope = None

    def _serve(self) -> ForkServer:
        """The fork server, which may still be importing."""
        if self._server and self._server.alive:
            self._server.receive()  # what has ended since the last run
        if not (self._server and self._server.alive):
            self._forget()
            self._server = ForkServer([*ALWAYS_PRELOADED, *self._preload])
        return self._server

    def _crew(self, size: int, device: str) -> World:
        """A world of `size` ranks, which may still be starting."""
        server = self._serve()
        crew = self._worlds.pop((size, device), None)
        if crew:
            crew.listen()
            if not crew.alive:
                self._discard(crew)
                crew = None
        if crew is None:
            while self._worlds and sum(map(len, self._worlds.values())) + size > limits().max_ranks:
                self._discard(next(iter(self._worlds.values())))
            crew = server.fork(size, device)
        self._worlds[size, device] = crew
        return crew

    def _attend(
        self,
        crew: World,
        bell: socket.socket,
        hear: OnMessage,
        done: Callable[[World], bool],
        deadline: float,
    ) -> Status:
        """Listen until `done`; returns what to call a rank that has not ended by then."""
        while not done(crew):
            if self._cancelled:
                return "cancelled"
            limit = min(deadline, crew.last_end + GRACE_S) if crew.failing else deadline
            left = limit - time.monotonic()
            if left <= 0:
                return "hung"
            for rank, message in self._listen(crew, left, bell):
                hear(rank, message)
        return "hung"

    def _listen(self, crew: World, seconds: float, *bells: socket.socket) -> list[tuple[int, Any]]:
        """Wait until something happens; returns the messages of ranks."""
        assert self._server
        with selectors.PollSelector() as selector:
            for source in (self._server, *bells, *crew.channels):
                selector.register(source, selectors.EVENT_READ)
            selector.select(seconds)
        self._server.receive()
        return crew.listen()

    def _discard(self, crew: World) -> None:
        """Kill a world, and hear its last words."""
        self._worlds = {key: other for key, other in self._worlds.items() if other is not crew}
        assert self._server
        self._server.kill(crew)
        limit = time.monotonic() + REAP_LIMIT_S
        while self._server.alive and not crew.gone and (left := limit - time.monotonic()) > 0:
            self._listen(crew, left)
        crew.disconnect()

    def _abandon(self) -> None:
        """In a process forked from the pool's owner: leave the ranks to the owner."""
        for crew in self._worlds.values():
            crew.disconnect()
        if self._server:
            self._server.abandon()
        self._reset()


def _standing(crew: World) -> bool:
    return crew.ready or crew.finished


def _finished(crew: World) -> bool:
    return crew.finished


_default = RankPool()


def default_pool() -> RankPool:
    """The pool of this process."""
    return _default


def _abandon_all() -> None:
    for pool in _pools:
        pool._abandon()


os.register_at_fork(after_in_child=_abandon_all)
