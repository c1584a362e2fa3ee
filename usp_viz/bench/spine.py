"""``usp-viz bench spine``: how fast the way from a scenario to a verdict is, on this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from usp_viz.bench.figures import BenchReport, Figure, median, progress
from usp_viz.cost import peak_bytes
from usp_viz.plan import plan
from usp_viz.runtime.pool import RankPool
from usp_viz.runtime.report import Job
from usp_viz.runtime.verify import run
from usp_viz.scenario import Scenario

SMALL = "dense-2x2"
DEGREES = ((4, 1), (2, 2), (1, 4))


def bench_spine(quick: bool = False) -> BenchReport:
    """Measure everything; `quick` uses small sizes and few runs, and proves nothing."""
    with RankPool() as pool:
        figures = [
            *_verdicts(pool, runs=5 if quick else 40),
            *_processes(runs=1 if quick else 3),
            *_attention(pool, total=1024 if quick else 16_384, runs=2 if quick else 7),
            *_memory(pool, total=1024 if quick else 16_384),
            *_simulation(runs=3),
        ]
    return BenchReport(tuple(_with_ratio(figures)))


def _verdicts(pool: RankPool, runs: int) -> Iterator[Figure]:
    progress("warm verdicts")
    scenario = Scenario.load(SMALL).set({"policy": "extended", "expect": None})
    for _ in range(3):
        run(scenario, pool=pool)
    walls = [float(run(scenario, pool=pool).timing["wall_ms"] or 0.0) for _ in range(runs)]
    yield median("warm run, call to verdict, U2 x R2, S 48", walls, "ms", "<= 50")


def _processes(runs: int) -> Iterator[Figure]:
    python = sys.executable
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    commands: dict[tuple[str, str], list[str]] = {
        ("cold usp-viz run", "<= 8"): [python, "-m", "usp_viz", "run", SMALL, "--json"],
        ("fresh torchrun of the same", ""): [
            *torchrun,
            *("-m", "usp_viz.runtime.worker", SMALL, "--json"),
        ],
        ("usp-viz --help", "<= 0.5"): [python, "-m", "usp_viz", "--help"],
        ("usp-viz check", "<= 0.5"): [python, "-m", "usp_viz", "check", SMALL],
    }
    for (name, goal), command in commands.items():
        progress(name)
        yield median(name, [_seconds(command) for _ in range(runs)], "s", goal)


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def _with_ratio(figures: list[Figure]) -> Iterator[Figure]:
    by_name = {figure.name: figure for figure in figures}
    for figure in figures:
        yield figure
        if figure.name == "fresh torchrun of the same":
            warm = next(f for name, f in by_name.items() if name.startswith("warm run"))
            ratio = figure.value * 1e3 / warm.value
            yield Figure("fresh torchrun / warm run", ratio, "x", ">= 50", figure.runs)


def _large(ulysses: int, ring: int, total: int) -> Scenario:
    return Scenario.parse(
        {
            "mesh": {"ulysses": ulysses, "ring": ring},
            "tensors": {"heads": 8, "head_dim": 64},
            "tokens": {"total": total},
        }
    )


def _attention(pool: RankPool, total: int, runs: int) -> Iterator[Figure]:
    """CPU time of all ranks against one process of SDPA with 2 threads, in turn."""
    floors: list[float] = []
    ours: dict[tuple[int, int], list[float]] = {degrees: [] for degrees in DEGREES}
    for n in range(runs + 1):
        progress(f"attention, S {total}, round {n} of {runs}")
        scenario = _large(1, 1, total)
        (floor,) = _job(pool, "floor", scenario, {"threads": 2})
        for degrees in DEGREES:
            ranks = _job(pool, "attention", _large(*degrees, total))
            if n:  # round 0 warms up
                ours[degrees].append(sum(rank[1] for rank in ranks))
        if n:
            floors.append(floor[1])
    for (ulysses, ring), seconds in ours.items():
        ratios = [a / b for a, b in zip(seconds, floors, strict=True)]
        name = f"CPU time, {ulysses}x{ring} / SDPA, S {total}, fp32"
        yield median(name, ratios, "x", "<= 1.05")


def _memory(pool: RankPool, total: int) -> Iterator[Figure]:
    for degrees in DEGREES:
        scenario = _large(*degrees, total)
        progress(f"peak tensor bytes, {degrees[0]}x{degrees[1]}")
        ranks = _job(pool, "attention", scenario, {"meter": True})
        predicted = peak_bytes(plan(scenario))
        ratios = [rank[2] / predicted[n] for n, rank in enumerate(ranks)]
        name = f"peak tensor bytes, {degrees[0]}x{degrees[1]} / model"
        note = f"{max(rank[2] for rank in ranks) / 2**20:.0f} MiB a rank"
        yield Figure(name, max(ratios), "x", "<= 1.2", 1, note)


def _job(pool: RankPool, name: str, scenario: Scenario, options: Any = None) -> list[Any]:
    payload = {"scenario": scenario.normalised()} | (options or {})
    report = pool.run(
        Job(f"usp_viz.bench.jobs:{name}", payload), world=scenario.mesh.ranks, timeout_s=600
    )
    failed = report.first_failure
    if failed is not None and failed.failure is not None:
        raise RuntimeError(f"bench job {name} failed on rank {failed.rank}: {failed.failure}")
    return [rank.value for rank in report.ranks]


def _simulation(runs: int) -> Iterator[Figure]:
    progress("simulation of 1024 ranks")
    scenario = Scenario.parse(
        {
            "mesh": {"ulysses": 32, "ring": 32},
            "tensors": {"heads": 32, "head_dim": 128},
            "tokens": {"total": 2**20},
            "attention": {"causal": True},
        }
    )

    def simulated() -> None:
        trace = plan(scenario).trace
        for step in range(trace.steps):
            trace.step(step)

    yield median("simulate U32 x R32, 1M tokens, all events", _times(simulated, runs), "s", "<= 2")


def _times(call: Callable[[], None], runs: int) -> list[float]:
    values: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        values.append(time.perf_counter() - start)
    return values
