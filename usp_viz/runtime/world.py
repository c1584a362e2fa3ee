"""A world of rank processes, as its caller knows it."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from usp_viz.runtime.report import Failure, RankReport, Status
from usp_viz.runtime.wire import Buffer, Channel

# A stopped rank takes nothing in: handing it a job gives up after this long (s, us).
SEND_LIMIT = struct.pack("ll", 1, 0)


class Rank:
    """One rank process.

    Attributes:
        rank: Its number.
        pid: Its process id, once forked.
        channel: Where it is heard; None before it is forked and after it has ended.
        exit: Its exit code, once it has ended.
        ready: Whether it has joined the world.
        status: How the job at hand ended here, None while it runs.
        untouched: How many groups it had made when the job at hand ended, if it is known to have
            begun no communication in it; else None.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid: int | None = None
        self.exit: int | None = None
        self.ready = False
        self.channel: Channel | None = None
        self.begin()

    def begin(self) -> None:
        """Forget the last job."""
        self.status: Status | None = None
        self.ended = 0.0
        self.untouched: int | None = None
        self._value: Any = None
        self._failure: Failure | None = None
        self._messages: list[Any] = []

    def end(self, status: Status) -> None:
        """Note how the job ended here, unless that is known."""
        if self.status is None:
            self.status = status
            self.ended = time.monotonic()

    def disconnect(self) -> None:
        """Close our end."""
        if self.channel:
            self.channel.close()
            self.channel = None

    def send(self, frame: list[Buffer]) -> None:
        """Hand over a job."""
        try:
            if self.channel:
                self.channel.write(frame)
        except OSError:
            pass  # dead or stopped: its exit, or the clock, will tell

    def listen(self) -> list[Any]:
        """Take in what it has sent and whether it has ended; returns the new messages."""
        heard = len(self._messages)
        try:
            for kind, *rest in self.channel.arrived() if self.channel else ():
                self._take(kind, rest)
        except EOFError:
            self.disconnect()
        except Exception as error:  # what it sent cannot be read in this process
            self._failure = Failure.of(error)
            self.end("raised")
        if self.exit is not None:  # and nothing it sent before is left unread
            self.disconnect()
            self.end("died")
        return self._messages[heard:]

    def _take(self, kind: Any, rest: list[Any]) -> None:
        if kind == "ready":
            self.ready = True
        elif kind == "message":
            self._messages += rest
        elif self.status is None:
            result, self.untouched = rest
            if kind == "ok":
                self._value = result
            else:
                self._failure = result
            self.end(kind)

    def report(self, sent: float) -> RankReport:
        """What became of the job that was sent at `sent`, in s of the monotonic clock."""
        assert self.status
        return RankReport(
            rank=self.rank,
            status=self.status,
            value=self._value,
            failure=self._failure,
            exit=self.exit,
            messages=tuple(self._messages),
            pid=self.pid,
            at_ms=max(0.0, self.ended - sent) * 1e3,
        )


class World:
    """The rank processes that see each other.

    Attributes:
        number: What the fork server calls it.
        device: What its ranks were asked to compute on.
        ranks: Its ranks.
        killed: Whether it has been sentenced.
    """

    def __init__(self, number: int, size: int, device: str) -> None:
        self.number = number
        self.device = device
        self.ranks = [Rank(rank) for rank in range(size)]
        self.killed = False

    def connect(self, number: int, pid: int, sock: socket.socket) -> None:
        """Rank `number` has been forked as process `pid`, which holds the other end of `sock`."""
        rank = self.ranks[number]
        rank.pid = pid
        if self.killed:
            sock.close()
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SEND_LIMIT)
        rank.channel = Channel(sock)

    def disconnect(self) -> None:
        """Close our ends of all its sockets."""
        for rank in self.ranks:
            rank.disconnect()

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def channels(self) -> list[Channel]:
        """Where its ranks can be heard."""
        return [rank.channel for rank in self.ranks if rank.channel]

    @property
    def ready(self) -> bool:
        """Whether every rank has joined."""
        return all(rank.ready for rank in self.ranks)

    @property
    def alive(self) -> bool:
        """Whether every rank is connected, and none known to have ended."""
        return all(rank.channel and rank.exit is None for rank in self.ranks)

    @property
    def gone(self) -> bool:
        """Whether every rank that was forked has ended."""
        return all(rank.pid is None or rank.exit is not None for rank in self.ranks)

    @property
    def failing(self) -> bool:
        """Whether a rank has raised or died."""
        return any(rank.status in ("raised", "died") for rank in self.ranks)

    @property
    def finished(self) -> bool:
        """Whether every rank has ended the job at hand."""
        return all(rank.status for rank in self.ranks)

    @property
    def last_end(self) -> float:
        """When a rank last ended the job at hand, in s of the monotonic clock."""
        return max(rank.ended for rank in self.ranks)

    @property
    def reusable(self) -> bool:
        """Whether another job can run here: no message of this one can meet one of the next.

        Every rank is alive and has answered, and either all returned or, when one raised, none had
        begun to communicate and all had made the same groups.
        """
        statuses = {rank.status for rank in self.ranks}
        groups = {rank.untouched for rank in self.ranks}
        return self.alive and (
            statuses == {"ok"}
            or (statuses <= {"ok", "raised"} and len(groups) == 1 and None not in groups)
        )

    def start(self, frame: list[Buffer]) -> None:
        """Hand every rank the job that `frame` encodes."""
        for rank in self.ranks:
            rank.begin()
            rank.send(frame)

    def listen(self) -> list[tuple[int, Any]]:
        """Take in what ranks have sent; returns (rank, message) for the new messages."""
        return [(rank.rank, message) for rank in self.ranks for message in rank.listen()]

    def end(self, status: Status) -> None:
        """Note `status` for the ranks that have not ended the job."""
        for rank in self.ranks:
            rank.end(status)
