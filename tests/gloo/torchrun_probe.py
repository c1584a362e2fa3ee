"""Under torchrun: run one job of pool_probes, and print on rank 0 what became of each rank.

Usage: torchrun … torchrun_probe.py NAME PAYLOAD TIMEOUT_S, the payload as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from torch.distributed.rendezvous import rendezvous

from usp_viz.runtime import torchrun
from usp_viz.runtime.report import Job

sys.path.insert(0, str(Path(__file__).parent))
name, payload, timeout_s = sys.argv[1:]
store, _, _ = next(rendezvous("env://"))
place = torchrun.Place.here()
assert place is not None
order = torchrun.Order(Job(f"pool_probes:{name}", json.loads(payload)), float(timeout_s), "cpu")
board = torchrun.Board(store.clone())
report = torchrun.run(place, store, board, order)
if isinstance(report, int):
    os._exit(report)
ranks = [
    {
        "status": rank.status,
        "value": rank.value,
        "failure": rank.failure and [rank.failure.name, rank.failure.message],
        "messages": list(rank.messages),
    }
    for rank in report.ranks
]
print(json.dumps(ranks), flush=True)
exit_code = 0 if report.ok else 5
board.dismiss(exit_code)
os._exit(exit_code)
