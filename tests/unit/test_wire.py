"""Frames over a socket pair, in whatever pieces they arrive."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from usp_viz.runtime.wire import Channel, encode


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    channel = Channel(right)
    yield left, channel
    left.close()
    channel.close()


VALUES = [
    None,
    {"a": [1, 2.5, "x"], "b": b"\0" * 10},
    np.arange(6, dtype=np.float32).reshape(2, 3),
    [np.zeros((0, 4)), np.asfortranarray(np.ones((2, 3))), np.arange(10)[::2], np.float64(3)],
]


def same(a, b):
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    return type(a) is type(b) and a == b


def test_objects_arrive_in_order_whatever_the_pieces(ends):
    left, channel = ends
    stream = b"".join(bytes(part) for value in VALUES for part in encode(value))
    arrived = []
    for start in range(0, len(stream), 7):
        left.sendall(stream[start : start + 7])
        arrived += channel.arrived()
    assert same(arrived, VALUES)
    assert list(channel.arrived()) == []


def test_several_objects_arrive_at_once(ends):
    left, channel = ends
    for value in VALUES:
        Channel(left.dup()).send(value)
    assert same([channel.receive(), *channel.arrived()], VALUES)


def test_large_arrays_cross_while_both_ends_work(ends):
    left, channel = ends
    array = np.arange(5_000_000)
    thread = threading.Thread(target=Channel(left.dup()).send, args=(array,))
    thread.start()
    got = channel.receive()
    thread.join()
    assert np.array_equal(got, array)
    got[0] = 7  # the receiver's own


def test_arrays_are_not_copied_into_the_pickle():
    array = np.zeros(1_000_000, dtype=np.uint8)
    head, outside = encode([array])
    assert len(head) < 1000
    assert np.shares_memory(np.frombuffer(outside, dtype=np.uint8), array)


@pytest.mark.parametrize("kept", [0, 1, 3, 40, -1])
def test_an_end_that_goes_away(ends, kept):
    left, channel = ends
    (whole,) = encode("x" * 100)
    left.sendall(whole[:kept])
    left.close()
    with pytest.raises(EOFError):
        list(channel.arrived())
    with pytest.raises(EOFError):
        channel.receive()


def test_an_object_that_cannot_be_read_does_not_spoil_the_next(ends):
    left, channel = ends

    class Torch:
        def __reduce__(self):
            import torch

            return torch.zeros, (2,)

    for value in ("before", Torch(), "after"):
        Channel(left.dup()).send(value)
    assert channel.receive() == "before"
    with pytest.raises(TypeError, match="torch"):
        channel.receive()
    assert list(channel.arrived()) == ["after"]


def test_nothing_is_sent_of_what_cannot_be_pickled(ends):
    left, channel = ends
    with pytest.raises(Exception, match="pickle"):
        Channel(left.dup()).send([1, lambda: None])
    assert list(channel.arrived()) == []
