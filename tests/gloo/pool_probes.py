"""Jobs that behave and misbehave: what the ranks of test_pool.py run."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

import numpy as np
import torch
import torch.distributed as dist


def nothing(ctx, payload):
    return None


def who(ctx, payload):
    return {
        "rank": ctx.rank,
        "world": ctx.world,
        "pid": os.getpid(),
        "zygote": os.getppid(),
        "zygote_threads": len(os.listdir(f"/proc/{os.getppid()}/task")),
        "threads": torch.get_num_threads(),
        "device": str(ctx.device),
        "payload": payload,
    }


def add_ranks(ctx, payload):
    return _sum(ctx.rank)


def groups(ctx, wanted):
    """The sum of ranks in each group (None where no member), and which objects the groups are."""
    found = ctx.groups(wanted)
    sums = [group and _sum(ctx.rank, group) for group in found]
    return sums, [group and id(group) for group in found]


def raise_everywhere(ctx, communicate_first):
    if communicate_first:
        _sum(ctx.rank)
    raise NotImplementedError("Not on any rank yet.")


def raise_between_groups(ctx, payload):
    """Rank 0 has made a group that the others have not; nobody has communicated."""
    if ctx.rank == 0:
        ctx.groups([(0,)])
    raise ValueError("out of step")


def raise_on_one(ctx, bad):
    if ctx.rank == bad:
        raise KeyError(f"rank {bad} only")
    _sum(ctx.rank)


def one_returns_without_the_others(ctx, payload):
    """Rank 0 leaves a message in flight; the others raise before they communicate."""
    if ctx.rank:
        raise ValueError("not me")
    dist.isend(torch.ones(1), 1)


def pause_on_one(ctx, who):
    """Emit where it is, then wait for a rank that never comes."""
    ctx.emit({"pid": os.getpid(), "at": "start"})
    _sum(ctx.rank)
    ctx.emit({"pid": os.getpid(), "at": "reduced"})
    if ctx.rank == who:
        signal.pause()
    _sum(ctx.rank)


def mismatched(ctx, payload):
    ctx.emit("start")
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.all_to_all_single(torch.empty(ctx.world), torch.ones(ctx.world))
    dist.barrier()


def end_process(ctx, how):
    if ctx.rank == 1:
        ctx.emit("last words")
        if how == "abort":
            os.abort()
        if how == "segfault":
            ctypes.string_at(0)
        os._exit(7)
    _sum(ctx.rank)


def leave(ctx, payload):
    sys.exit("bye")


def chatter(ctx, payload):
    print(f"python says {ctx.rank}")
    os.write(1, b"C says hello\n")


class Unprintable(Exception):
    def __init__(self):
        super().__init__()
        self.why = lambda: None  # nor can it be pickled

    def __str__(self):
        raise ZeroDivisionError


def raise_unprintable(ctx, payload):
    raise Unprintable


def answer_with(ctx, what):
    return {"function": lambda: None, "tensor": torch.ones(2), "dtype": torch.float32}[what]


def emit_tensor(ctx, payload):
    ctx.emit(torch.ones(2))


def emit_from_threads(ctx, count):
    def work(letter):
        for number in range(count):
            ctx.emit((letter, number))

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def emit_large(ctx, size):
    for number in range(3):
        ctx.emit(np.full(size, 10 * ctx.rank + number, dtype=np.uint8))


def large_output(ctx, count):
    return {"rank": ctx.rank, "values": np.arange(count, dtype=np.float64) + ctx.rank}


def bracket(ctx, name):
    ctx.emit((name, "begin"))
    _sum(1.0)
    ctx.emit((name, "end"))


def _sum(value, group=None):
    total = torch.tensor([float(value)])
    dist.all_reduce(total, group=group)
    return total.item()
