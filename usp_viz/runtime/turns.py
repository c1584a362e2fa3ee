"""A lock that serves threads in the order they came."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A first-come, first-served mutex, used as a context manager."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()
        except BaseException:  # Ctrl-C in the queue
            with self._guard:
                queued = mine in self._waiting
                if queued:
                    self._waiting.remove(mine)
            if not queued:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
