"""Python objects over a stream socket, arrays without a copy into the pickle.

A frame is a count, the lengths of so many parts, and the parts: a pickle (protocol 5), then the
buffers it refers to. Only our own children speak on these sockets.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
import threading
from collections.abc import Generator, Iterator
from typing import Any

Buffer = bytes | bytearray | memoryview


def encode(value: Any) -> list[Buffer]:
    """`value` as the buffers of one frame.

    Raises:
        Exception: Whatever pickling it raises; nothing has been sent then.
    """
    outside: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=outside.append)
    parts = [body, *(buffer.raw() for buffer in outside)]
    lengths = [len(part) for part in parts]
    return [struct.pack(f"<I{len(parts)}Q", len(parts), *lengths) + body, *parts[1:]]


class Channel:
    """One end of a socket pair that carries pickled objects."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._writing = threading.Lock()
        self._parts = _frame()
        self._missing = memoryview(b"")

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def __del__(self) -> None:
        self.close()

    def send(self, value: Any) -> None:
        """Send `value`, waiting until the other end has taken it."""
        self.write(encode(value))

    def write(self, frame: list[Buffer]) -> None:
        """Send an encoded frame; frames of several threads do not mix."""
        with self._writing:
            for part in frame:
                self._sock.sendall(part)

    def receive(self) -> Any:
        """The next object, waiting for it.

        Raises:
            EOFError: The other end is gone.
        """
        return _decode(self._read(0))

    def arrived(self) -> Iterator[Any]:
        """The objects that have arrived whole, without waiting; raises as `receive` does."""
        while parts := self._read(socket.MSG_DONTWAIT):
            yield _decode(parts)

    def _read(self, flags: int) -> list[bytearray]:
        while True:
            while self._missing:
                try:
                    count = self._sock.recv_into(self._missing, 0, flags)
                except BlockingIOError:
                    return []
                except ConnectionResetError:
                    count = 0
                if not count:
                    raise EOFError("the other end is gone")
                self._missing = self._missing[count:]
            try:
                self._missing = memoryview(next(self._parts))
            except StopIteration as end:
                self._parts = _frame()
                return end.value


def _frame() -> Generator[bytearray, None, list[bytearray]]:
    """Yield the buffers that make up one frame, each to be filled before the next is asked for."""
    count = bytearray(4)
    yield count
    lengths = bytearray(8 * int.from_bytes(count, "little"))
    yield lengths
    parts = [bytearray(length) for (length,) in struct.iter_unpack("<Q", lengths)]
    yield from parts
    return parts


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        # Unpickling a tensor would import torch into a process that does without it.
        if module_name.partition(".")[0] == "torch":
            raise TypeError(
                f"{module_name}.{global_name} cannot leave its rank: "
                "return and emit plain data and numpy arrays"
            )
        return super().find_class(module_name, global_name)


def _decode(parts: list[bytearray]) -> Any:
    return _Unpickler(io.BytesIO(parts[0]), buffers=parts[1:]).load()
