"""Threads are served in the order they came."""

from __future__ import annotations

import threading

import pytest

from usp_viz.runtime.turns import Turns


def queue_up(turns, count, work):
    """Start `count` threads, each only when the one before it waits in the queue."""
    threads = []
    for number in range(count):
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        while len(turns._waiting) <= number:
            assert thread.is_alive()
        threads.append(thread)
    return threads


def test_first_come_first_served_one_at_a_time():
    turns, order, inside = Turns(), [], []

    def work(number):
        with turns:
            inside.append(number)
            assert inside == [number]
            order.append(number)
            inside.remove(number)

    with turns:
        threads = queue_up(turns, 8, work)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == list(range(8))
    with turns:  # and free again
        pass


def test_an_error_inside_gives_the_turn_away():
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns:
        1 / 0  # noqa: B018
    done = threading.Event()
    thread = threading.Thread(target=lambda: turns.__enter__() or done.set())
    thread.start()
    thread.join()
    assert done.is_set()


class _Interrupted:
    """A lock whose owner is interrupted while it waits, before or after it has been served."""

    def __init__(self, served):
        self._served = served

    def acquire(self):
        if hasattr(self, "_once"):
            self._served()
            raise KeyboardInterrupt
        self._once = True

    def release(self):
        pass


@pytest.mark.parametrize("served_first", [False, True])
def test_an_interrupt_in_the_queue_loses_nobody_his_turn(monkeypatch, served_first):
    turns = Turns()
    turns.__enter__()
    served = (lambda: turns.__exit__()) if served_first else (lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr("usp_viz.runtime.turns.threading.Lock", lambda: _Interrupted(served))
        with pytest.raises(KeyboardInterrupt):
            turns.__enter__()
    assert not turns._waiting
    if not served_first:
        assert turns._taken
        turns.__exit__()
    assert not turns._taken
