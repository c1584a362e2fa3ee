"""The fork server: imports torch once, then forks ranks in milliseconds.

It has one thread and never runs a torch operation: a child forked from a process with OpenMP
threads hangs. It is not `multiprocessing.forkserver`, which runs the user's main module again and
swallows what goes wrong in a preload.

Control packets are JSON arrays. In: ``["fork", world, size, device]``, ``["kill", world]``.
Out: ``["failed", module, missing, traceback]``; ``["rank", world, rank, pid]`` with the caller's
end of that rank's socket pair; ``["exit", world, rank, code]``; ``["stuck", world, why]`` when the
machine lets us fork no more.

However the caller ends, its end of the control socket closes: every rank is then killed and reaped.
The ranks have asked the kernel to be killed when the fork server is.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

PACKET = 60_000  # bytes; a packet fits any default socket buffer
GONE = (BrokenPipeError, ConnectionResetError)
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def main(control_fd: int, modules: list[str]) -> None:
    """Import `modules`, then serve the caller at the other end of the control socket."""
    os.dup2(2, 1)  # stdout is the caller's: a rank that prints must not spoil its JSON
    if sys.stdout:
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    _prctl(PR_SET_NAME, b"usp-viz zygote")
    control = socket.socket(fileno=control_fd)
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            _send(control, ["failed", module, missing, traceback.format_exc()[-PACKET // 8 :]])
            return
    gc.freeze()  # memory that collections leave alone stays shared with the ranks
    _Zygote(control).serve()


class _Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._pid = os.getpid()
        self._control = control
        self._ranks: dict[int, tuple[int, int]] = {}  # pid -> (world, rank)
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._ring, False)
        signal.set_wakeup_fd(self._ring, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())

    def serve(self) -> None:
        try:
            while True:
                readable, _, _ = select.select([self._control, self._bell], [], [])
                if self._bell in readable:
                    os.read(self._bell, 4096)
                    self._reap()
                if self._control in readable:
                    packet = self._control.recv(PACKET)
                    if not packet:
                        return
                    self._obey(*json.loads(packet))
        except GONE:
            return
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._kill(list(self._ranks))
            for pid in self._ranks:
                os.waitpid(pid, 0)

    def _obey(self, command: str, world: int, *arguments: Any) -> None:
        if command == "kill":
            self._kill([pid for pid, (its, _) in self._ranks.items() if its == world])
        else:
            self._fork(world, *arguments)

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:  # not reaped yet, so no other process can have the number
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            _send(self._control, ["exit", *self._ranks.pop(pid), code])

    def _fork(self, world: int, size: int, device: str) -> None:
        store_fd = os.memfd_create("usp-viz-store")
        try:
            for rank in range(size):
                callers, own = socket.socketpair()
                with callers, own:
                    pid = os.fork()
                    if not pid:
                        callers.close()
                        self._become_rank(own, store_fd, rank, size, device)
                    self._ranks[pid] = (world, rank)
                    _send(self._control, ["rank", world, rank, pid], callers.fileno())
        except GONE:
            raise
        except OSError as error:
            _send(self._control, ["stuck", world, str(error)])
        finally:
            os.close(store_fd)

    def _become_rank(self, own: socket.socket, store_fd: int, rank: int, *rest: Any) -> NoReturn:
        code = 1
        try:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:  # it ended before the kernel was told
                os._exit(code)
            _prctl(PR_SET_NAME, b"usp-viz rank %d" % rank)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for fd in (self._control.fileno(), self._bell, self._ring):
                os.close(fd)
            from usp_viz.runtime.rank import live

            live(own, store_fd, rank, *rest)
            code = 0
        except GONE:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # never back into the fork server's loop


def _send(control: socket.socket, packet: list[Any], *fds: int) -> None:
    socket.send_fds(control, [json.dumps(packet).encode()], fds)


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
