"""Peak memory of tensors on one rank, counted where they are made.

The CPU allocator keeps no statistics, so a dispatch mode looks at each operation's results: storage
that is alive counts once, however many views it has. Scratch memory inside a kernel is not seen.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMeter(TorchDispatchMode):
    """``with PeakMeter(q, k, v) as meter: …`` then ``meter.peak`` bytes, inputs included."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._see(inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then look at what it made."""
        result = func(*args, **(kwargs or {}))
        self._see(tree_leaves(result))
        return result

    def _see(self, found: Any) -> None:
        for tensor in found:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                self._alive.setdefault(ref.cdata, (ref, storage.nbytes()))
        gone = [key for key, (ref, _) in self._alive.items() if ref.expired()]
        for key in gone:
            del self._alive[key]
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
