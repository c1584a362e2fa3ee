"""What a job sees of the world it runs in, the same under the pool and under torchrun."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from usp_viz.errors import MissingRequirement
from usp_viz.runtime.limits import threads_per_rank

GroupRanks = tuple[int, ...]
NEVER = timedelta(days=1)


class RankContext:
    """One rank's place in the world, and its way to the process groups and to the caller.

    Attributes:
        rank: This rank's number.
        world: How many ranks there are, P.
        device: Where tensors live.
        backend: What moves tensors that live on `device`: ``gloo`` or ``nccl``. It is gloo on a
            CUDA device when GPUs are fewer than ranks; what is sent must then be on the CPU.
    """

    def __init__(self, rank: int, world: int, device: torch.device, backend: str) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self.backend = backend
        self._send: Callable[[Any], None] | None = None
        self._groups: dict[GroupRanks, dist.ProcessGroup | None] = {
            tuple(range(world)): dist.group.WORLD
        }

    def emit(self, message: Any) -> None:
        """Send plain data to the caller at once; it stays known whatever becomes of this rank."""
        if self._send is None:
            raise RuntimeError("emit() after the job has returned")
        self._send(message)

    def groups(self, wanted: Iterable[Sequence[int]]) -> list[dist.ProcessGroup | None]:
        """The process groups over these ranks, None where this rank is no member.

        Collective: every rank of the world asks for the same groups in the same order. They are
        made once and kept as long as the world.

        Raises:
            ValueError: Ranks that do not ascend, which torch would silently sort.
        """
        found = []
        for ranks in map(tuple, wanted):
            if list(ranks) != sorted(set(ranks)):
                raise ValueError(f"the ranks of a group must ascend; these do not: {ranks}")
            if ranks not in self._groups:
                group = dist.new_group(list(ranks))
                self._groups[ranks] = group if isinstance(group, dist.ProcessGroup) else None
            found.append(self._groups[ranks])
        return found

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group over `ranks`, this rank among them; collective like `groups`."""
        (group,) = self.groups([ranks])
        if group is None:
            raise ValueError(f"rank {self.rank} is no member of group {tuple(ranks)}")
        return group

    @property
    def groups_made(self) -> int:
        """How many groups this rank has made or seen made."""
        return len(self._groups)

    def operations(self) -> int | None:
        """How many collectives, sends and receives this rank has begun; None where unknown."""
        if self.backend != "gloo":
            return None
        groups = [group for group in self._groups.values() if group is not None]
        return sum(group._get_sequence_number_for_group() for group in groups)  # pyright: ignore[reportAttributeAccessIssue]

    def run(self, entry: str, payload: Any, send: Callable[[Any], None]) -> Any:
        """Call the function that `entry` names."""
        module, _, name = entry.partition(":")
        self._send = send
        try:
            return getattr(importlib.import_module(module), name)(self, payload)
        finally:
            self._send = None


def join(
    store: Store, rank: int, world: int, device: str, local_rank: int, local_world: int
) -> RankContext:
    """Become rank `rank` of `world`; returns when the others have, too.

    Args:
        store: Where the ranks find each other.
        rank: This rank's number.
        world: How many ranks there are.
        device: ``cpu``, ``cuda``, or ``auto``: CUDA if every rank gets a GPU of its own.
        local_rank: This rank's number on its machine.
        local_world: How many ranks share that machine.

    Raises:
        MissingRequirement: CUDA is asked for and there is none.
    """
    torch.set_num_threads(threads_per_rank(local_world))
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise MissingRequirement(
            "run.device is cuda and torch finds no CUDA device",
            "Use --set run.device=cpu, or install a CUDA build of torch on a machine with a GPU.",
        )
    on_cuda = device == "cuda" or (device == "auto" and gpus >= local_world)
    backend = "nccl" if on_cuda and gpus >= local_world else "gloo"
    if on_cuda:
        place = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(place)
    else:
        place = torch.device("cpu")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        # Whoever started the ranks ends a run that takes too long, and says who was where.
        timeout=NEVER,
    )
    return RankContext(rank, world, place, backend)
