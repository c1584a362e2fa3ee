"""The caller's side of the fork server."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from usp_viz.errors import MissingRequirement
from usp_viz.runtime.limits import zygote_environment
from usp_viz.runtime.world import World
from usp_viz.runtime.zygote import PACKET

# The caller's own module path, whatever made it, and nothing imported from the working directory.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; from usp_viz.runtime.zygote import main; "
    "main(int(sys.argv[1]), sys.argv[2].split(','))"
)
_STOP_LIMIT_S = 5.0


class ForkServer:
    """A running zygote and the worlds it has forked.

    It starts in the background: `fork` may be called at once.

    Attributes:
        alive: False once the process is known to have ended.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        """Start it.

        Args:
            modules: What it imports before it forks.

        Raises:
            MissingRequirement: This is not Linux.
        """
        if sys.platform != "linux":
            raise MissingRequirement(
                "Rank processes need Linux (nameless files, death signals)",
                "Use Linux, WSL 2 or a container; check and simulate work everywhere.",
            )
        self.alive = True
        self._worlds: dict[int, World] = {}
        self._numbers = itertools.count()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), ",".join(modules), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=zygote_environment(),
                start_new_session=True,  # Ctrl-C is for the caller
            )
        self._stop = weakref.finalize(self, _stop, self._process, self._control, os.getpid())

    def fileno(self) -> int:
        """Readable when there is something to `receive`."""
        return self._control.fileno()

    def fork(self, size: int, device: str) -> World:
        """Ask for the ranks of a new world; they appear while `receive` is called."""
        world = World(next(self._numbers), size, device)
        self._worlds[world.number] = world
        self._send(["fork", world.number, size, device])
        return world

    def kill(self, world: World) -> None:
        """Have the ranks of `world` killed."""
        world.killed = True
        self._send(["kill", world.number])

    def receive(self) -> None:
        """Take in which ranks have been forked and which have ended, without waiting.

        Raises:
            MissingRequirement: A module that the ranks need is not installed.
            RuntimeError: The ranks cannot be started for another reason.
        """
        while self.alive:
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            try:
                # not socket.recv_fds, which ignores its flags
                packet, ancillary, _, _ = self._control.recvmsg(PACKET, socket.CMSG_LEN(4), flags)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # said once, ahead of the packets that are still there
            if packet:
                fds = (int.from_bytes(data, sys.byteorder) for _, _, data in ancillary)
                self._note(*json.loads(packet), *(socket.socket(fileno=fd) for fd in fds))
            else:
                self._lost()

    def close(self) -> None:
        """End the zygote and every rank."""
        self.alive = False
        self._disconnect()
        self._stop()

    def abandon(self) -> None:
        """Leave it to the process that forked this one."""
        self._stop.detach()
        self._control.close()
        self._disconnect()

    def _send(self, packet: list[Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended, which `receive` will find
            self._control.send(json.dumps(packet).encode())

    def _note(self, kind: str, *rest: Any) -> None:
        if kind == "rank":
            number, rank, pid, sock = rest
            self._worlds[number].connect(rank, pid, sock)
        elif kind == "exit":
            number, rank, code = rest
            self._worlds[number].ranks[rank].exit = code
            if self._worlds[number].gone:
                del self._worlds[number]
        elif kind == "stuck":
            raise RuntimeError(f"this machine starts no more processes: {rest[1]}")
        else:
            module, missing, text = rest
            self.close()
            if missing and missing.partition(".")[0] != "usp_viz":
                raise MissingRequirement(
                    f"The rank processes need the module {missing} (imported by {module})",
                    f"pip install {missing.partition('.')[0]}",
                )
            raise RuntimeError(f"the rank processes cannot import {module}:\n{text}")

    def _lost(self) -> None:
        """The zygote has ended, and the kernel has killed its ranks."""
        self.alive = False
        self._stop()
        wanted = [world for world in self._worlds.values() if not world.killed]
        if any(rank.pid is None for world in wanted for rank in world.ranks):
            raise RuntimeError(
                "the fork server ended before it had forked the ranks, with code "
                f"{self._process.returncode}; what it said is on stderr"
            )
        for world in self._worlds.values():
            for rank in world.ranks:
                if rank.exit is None:
                    rank.exit = -signal.SIGKILL

    def _disconnect(self) -> None:
        for world in self._worlds.values():
            world.disconnect()


def _stop(process: subprocess.Popen[bytes], control: socket.socket, owner: int) -> None:
    control.close()
    if os.getpid() != owner:
        return
    process.terminate()  # while it imports torch it does not look at the control socket
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
