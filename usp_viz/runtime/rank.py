"""The life of one rank process of a pool: join the world, run jobs until the caller is gone."""

from __future__ import annotations

import faulthandler
import socket
from typing import Any

from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from usp_viz.runtime import context
from usp_viz.runtime.report import Failure
from usp_viz.runtime.wire import Buffer, Channel, encode


def live(sock: socket.socket, store_fd: int, rank: int, world: int, device: str) -> None:
    """Serve the caller at the other end of `sock`; returns when that end is gone.

    Args:
        sock: Our end of a socket pair.
        store_fd: An open, empty, nameless file that all ranks of this world share.
        rank: This rank's number.
        world: How many ranks there are.
        device: ``cpu``, ``cuda`` or ``auto``.
    """
    faulthandler.enable()  # a kernel that crashes says where, on stderr
    channel = Channel(sock)
    try:
        # A file without a name leaves nothing behind, and nothing listens for the rendezvous.
        store = FileStore(f"/proc/self/fd/{store_fd}", world)
        ctx = context.join(store, rank, world, device, local_rank=rank, local_world=world)
    except BaseException as error:
        channel.send(("raised", Failure.of(error), None))
        return
    channel.send(("ready",))
    while True:
        try:
            entry, payload = channel.receive()
        except EOFError:
            return
        channel.write(_answer(ctx, entry, payload, channel))


def _answer(ctx: context.RankContext, entry: str, payload: Any, channel: Channel) -> list[Buffer]:
    """Run one job; returns the frame that says how it ended."""
    before = ctx.operations()

    def untouched() -> int | None:
        return ctx.groups_made if before is not None and ctx.operations() == before else None

    try:
        value = ctx.run(entry, payload, lambda message: channel.send(("message", message)))
        return encode(("ok", value, untouched()))
    except BaseException as error:  # SystemExit, too: it ends the job, not the rank
        return encode(("raised", Failure.of(error), untouched()))
