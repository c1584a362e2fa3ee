"""A scenario under torchrun, on one machine or on several.

    torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT \
        -m usp_viz.runtime.worker FILE [--set KEY=VALUE] [--json]

Rank 0 reads the file, judges and prints; the others need no file. Gloo finds its network interface
by the machine's name; ``GLOO_SOCKET_IFNAME`` names another.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from usp_viz.errors import InvalidScenario, MissingRequirement, UspVizError


def main(argv: Sequence[str] | None = None) -> int:
    """Be one rank of torchrun's world; returns the exit code, on all ranks that of the verdict."""
    arguments = _parser().parse_args(argv)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what ranks print must not spoil the verdict

    from torch.distributed.rendezvous import rendezvous

    from usp_viz.runtime import torchrun

    place = torchrun.Place.here()
    if place is None:
        print("this process has no rank: start this module with torchrun", file=sys.stderr)
        return 2
    if place.world == place.local_world:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, _, _ = next(rendezvous("env://"))
    board = torchrun.Board(store.clone())  # pyright: ignore[reportAttributeAccessIssue]
    if place.rank:
        order = board.get("order")
        code = torchrun.run(place, store, board, order) if order else board.get(torchrun.EXIT_CODE)
        assert isinstance(code, int)
        return code
    code, text = _lead(arguments, place, store, board)
    if text:
        print(text, file=out, flush=True)
    board.dismiss(code)
    return code


def _lead(arguments: Any, place: Any, store: Any, board: Any) -> tuple[int, str]:
    """Rank 0's part: the exit code and what to print."""
    from usp_viz.loading import parse_sets
    from usp_viz.runtime import torchrun, verify
    from usp_viz.runtime.report import RunReport
    from usp_viz.scenario import Scenario

    scenario = None
    try:
        scenario = Scenario.load(arguments.file, parse_sets(arguments.sets))
        if arguments.sets:  # `expect` speaks of the file's own question
            scenario = scenario.set({"expect": None})
        if scenario.mesh.ranks != place.world:
            limit = f"torchrun has started {place.world} ranks: nnodes x nproc-per-node must agree"
            raise InvalidScenario("mesh", scenario.mesh.ranks, limit, [place.world])
        verify.check_limits(scenario)
        job = verify.job(scenario)
        order = torchrun.Order(job, scenario.run.timeout_s, scenario.run.device)
    except UspVizError as error:
        board.put("order", None)
        return _refuse(arguments, scenario, error)
    board.put("order", order)
    try:
        report = torchrun.run(place, store, board, order)
    except MissingRequirement as error:
        return _refuse(arguments, scenario, error)
    assert isinstance(report, RunReport)
    result = verify.judge(scenario, report)
    if arguments.json:
        return result.exit_code, json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False)
    from usp_viz.views.verdict import run_text

    return result.exit_code, run_text(result, arguments.file)


def _refuse(arguments: Any, scenario: Any, error: UspVizError) -> tuple[int, str]:
    from usp_viz.runtime.result import invalid_json

    print(f"{arguments.file}: {error}", file=sys.stderr)
    if not isinstance(error, InvalidScenario):
        return 4, ""
    return 2, json.dumps(invalid_json(error, scenario)) if arguments.json else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun … -m usp_viz.runtime.worker",
        description="Run a scenario on the ranks that torchrun has started, and judge it.",
    )
    parser.add_argument("file", metavar="FILE", help="a path, or the name of a bundled scenario")
    parser.add_argument("--set", dest="sets", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # a thread may wait for ever in a collective
