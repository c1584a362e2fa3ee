"""One job in a world that torchrun started, with the same report as from a pool.

A thread runs the job; the main thread watches the clock and the other ranks. They speak through
torchrun's store, which answers when a collective hangs. Whoever can reach that store is trusted, as
torchrun itself does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import (
    DistError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from usp_viz.runtime import context
from usp_viz.runtime.pool import GRACE_S, START_LIMIT_S
from usp_viz.runtime.report import (
    Failure,
    Job,
    RankReport,
    RunReport,
    Status,
    raise_what_is_missing,
)

TICK_S = 0.02
SLACK_S = 1.0  # how long rank 0 waits for reports once the others must have written theirs
EXIT_CODE = "exit code"
CHUNK = 1 << 20  # bytes; the store takes no value over 8 MiB


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank this is, as torchrun says in the environment."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @classmethod
    def here(cls) -> Place | None:
        """This process's place; None if torchrun did not start it."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if any(name not in os.environ for name in names):
            return None
        return cls(*(int(os.environ[name]) for name in names))


@dataclass(frozen=True, slots=True)
class Order:
    """What rank 0 has all ranks do."""

    job: Job
    timeout_s: float
    device: str


class Board:
    """Where ranks leave what the others must know, by key."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("usp-viz", store)

    def put(self, key: str, value: Any) -> None:
        """Write `value`, of any size."""
        data = pickle.dumps(value, protocol=5)
        starts = range(0, len(data), CHUNK)
        for number, start in enumerate(starts):
            part: Any = data[start : start + CHUNK]  # bytes, which its stub does not know
            self._store.set(f"{key}/{number}", part)
        self._store.set(key, str(len(starts)))

    def has(self, key: str) -> bool:
        """Whether `key` has been written."""
        return self._store.check([key])

    def get(self, key: str) -> Any:
        """What was written, waiting for it."""
        count = int(self._store.get(key))
        return pickle.loads(b"".join(self._store.get(f"{key}/{n}") for n in range(count)))

    def add_to(self, log: str, value: Any) -> None:
        """Write `value` at the end of a log that only this rank writes."""
        self.put(f"{log}/{self._store.add(f'{log}/length', 1)}", value)

    def read(self, log: str) -> list[Any]:
        """What a log holds, even when its writer has died in the middle of a line."""
        keys = [f"{log}/{n + 1}" for n in range(self._store.add(f"{log}/length", 0))]
        return [self.get(key) for key in keys if self.has(key)]

    def dismiss(self, exit_code: int) -> None:
        """Let the other ranks end, with this exit code."""
        self.put(EXIT_CODE, exit_code)

    def fail(self) -> None:
        """Tell that one more rank has failed."""
        self._store.add("failures", 1)

    @property
    def failures(self) -> int:
        """How many ranks have."""
        return self._store.add("failures", 0)


class _Attempt:
    """The job on this rank, in a thread that may never return."""

    def __init__(self, place: Place, store: Store, order: Order) -> None:
        self._place, self._store, self._order = place, store, order
        self._unsent: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._status: Status | None = None
        self._value: Any = None
        self._failure: Failure | None = None
        self.begun = self.ready = time.monotonic()
        self.joined = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            place = self._place
            ctx = context.join(
                self._store,
                place.rank,
                place.world,
                self._order.device,
                local_rank=place.local_rank,
                local_world=place.local_world,
            )
            self.ready, self.joined = time.monotonic(), True
            job = self._order.job
            self._value = ctx.run(job.entry, job.payload, self._emit)
            self._status = "ok"
        except BaseException as error:
            self._failure = Failure.of(error)
            self._status = "raised"

    def _emit(self, message: Any) -> None:
        self._unsent.put(pickle.dumps(message, protocol=5))

    def tell(self, board: Board) -> None:
        """Write what the job has emitted since, in the thread that may speak to the board."""
        lines = []
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._unsent.get_nowait())
        if lines:
            board.add_to(_log(self._place.rank), lines)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def deadline(self) -> float:
        return self.ready + self._order.timeout_s if self.joined else self.begun + START_LIMIT_S

    def report(self) -> RankReport:
        return RankReport(
            rank=self._place.rank,
            status=self._status or "hung",
            value=self._value,
            failure=self._failure,
            pid=os.getpid(),
            at_ms=(time.monotonic() - self.ready) * 1e3,
        )


class _Watch:
    """When to stop waiting: the deadline, or a while after the latest failure."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._failures = 0
        self._grace = float("inf")
        self.told_to_end = False
        signal.signal(signal.SIGTERM, self._end)  # torchrun's word when another rank is gone
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches torchrun, which sends SIGTERM

    def _end(self, *_: object) -> None:
        self.told_to_end = True
        self._grace = min(self._grace, time.monotonic() + GRACE_S)

    def for_exit_code(self) -> int:
        with contextlib.suppress(DistError):  # the store has gone with rank 0's machine
            while not self.told_to_end:
                if self._board.has(EXIT_CODE):
                    return self._board.get(EXIT_CODE)
                time.sleep(TICK_S)
        return 1

    def limit(self, deadline: float) -> float:
        failures = self._board.failures
        if failures != self._failures and not self.told_to_end:
            self._grace = time.monotonic() + GRACE_S
        self._failures = failures
        return min(deadline, self._grace)


def run(place: Place, store: Store, board: Board, order: Order) -> RunReport | int:
    """Take part in `order`.

    Returns:
        On rank 0 the report of all ranks; it must give `Board.dismiss` an exit code then. On the
        others that exit code: an agent whose ranks succeed while another's fail waits minutes.

    Args:
        place: Which rank this is.
        store: Torchrun's store, for the job to rendezvous with.
        board: The same, on a connection of its own: the job may hold the other for long.
        order: The same on every rank.

    Raises:
        MissingRequirement: This machine lacks what the ranks need.
    """
    attempt, watch = _Attempt(place, store, order), _Watch(board)
    while not attempt.ended and time.monotonic() < watch.limit(attempt.deadline):
        attempt.tell(board)
        time.sleep(TICK_S)
    attempt.tell(board)
    _post(board, attempt.report())
    if place.rank:
        return watch.for_exit_code()
    keys = {rank: f"report/{rank}" for rank in range(place.world)}
    while time.monotonic() < watch.limit(attempt.deadline) + SLACK_S:
        if all(map(board.has, keys.values())):
            break
        time.sleep(TICK_S)
    ended = time.monotonic()
    reports = tuple(_collect(board, rank, key) for rank, key in keys.items())
    if not attempt.joined:
        raise_what_is_missing(reports)
    return RunReport(
        ranks=reports,
        wall_ms=(ended - attempt.ready) * 1e3,
        cold_start_ms=(attempt.ready - attempt.begun) * 1e3,
    )


def _log(rank: int) -> str:
    return f"messages/{rank}"


def _collect(board: Board, rank: int, key: str) -> RankReport:
    report = board.get(key) if board.has(key) else RankReport(rank, "died")
    messages = [pickle.loads(line) for lines in board.read(_log(rank)) for line in lines]
    return replace(report, messages=tuple(messages))


def _post(board: Board, report: RankReport) -> None:
    if report.status != "ok":
        board.fail()
    try:
        board.put(f"report/{report.rank}", report)
    except Exception as error:  # it cannot be pickled
        broken = RankReport(report.rank, "raised", failure=Failure.of(error), pid=report.pid)
        board.put(f"report/{report.rank}", broken)
