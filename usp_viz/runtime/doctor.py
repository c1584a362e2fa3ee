"""What this machine has and lacks, each lack with the line that mends it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from usp_viz.errors import InvalidScenario, MissingRequirement
from usp_viz.runtime.limits import limits
from usp_viz.runtime.pool import RankPool
from usp_viz.runtime.report import Job
from usp_viz.scenario import ENGINES, Scenario

SMALLEST: dict[str, Any] = {
    "name": "doctor",
    "mesh": {"ring": 2},
    "tensors": {"heads": 1, "head_dim": 4},
    "tokens": {"total": 2},
    "run": {"device": "cpu"},
}
"""One row and one head on each of two ranks."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
GPU_EXTRA = "pip install --no-build-isolation 'usp-viz[gpu]'"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        ok: Whether it is there and works.
        needed: Whether nothing runs without it.
        text: What was found, or what is missing and how to get it.
    """

    name: str
    ok: bool
    needed: bool
    text: str

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def examine() -> list[Finding]:
    """Look at everything; starts two ranks, which import torch, and imports none here."""
    with RankPool() as pool:
        torch = _Torch.on(pool)
        ranks = _ranks(pool)
    return [_python(), torch.finding, torch.gpu, ranks, *_machine(), *_optional()]


def describe_torch(context: Any, payload: Any) -> dict[str, Any]:
    """What torch says on a rank: version, and names of the CUDA devices."""
    import torch

    count = torch.cuda.device_count()
    return {
        "version": str(torch.__version__),
        "devices": [torch.cuda.get_device_name(n) for n in range(count)],
    }


def _python() -> Finding:
    fine = (3, 10) <= sys.version_info < (3, 14)
    text = platform.python_version()
    return Finding("python", fine, True, text if fine else f"{text}; use Python 3.10 to 3.13")


@dataclass(frozen=True, slots=True)
class _Torch:
    finding: Finding
    gpu: Finding

    @staticmethod
    def on(pool: RankPool) -> _Torch:
        """Ask a rank, so that this process needs no torch."""
        found: Mapping[str, Any] | None = None
        installed = _version("torch")
        problem = f"{installed} is installed" if installed else "pip install 'torch>=2.11'"
        try:
            report = pool.run(Job(f"{__name__}:describe_torch"), world=2, timeout_s=60)
            found = report.ranks[0].value
        except Exception as error:
            problem += f"; no rank could be asked: {_first_line(error)}"
        finding = Finding("torch", found is not None, True, found["version"] if found else problem)
        devices = ", ".join(found["devices"]) if found else ""
        nothing = "torch sees no CUDA device: runs use CPU ranks (gloo). With a GPU, install a "
        nothing += "CUDA build of torch: https://pytorch.org/get-started/locally"
        return _Torch(finding, Finding("gpu", bool(devices), False, devices or nothing))


def _ranks(pool: RankPool) -> Finding:
    """Whether two ranks can talk and compute: the smallest scenario, judged as any other."""
    from usp_viz.runtime.verify import run

    try:
        result = run(Scenario.parse(SMALLEST), pool=pool)
    except Exception as error:
        return Finding("ranks (gloo)", False, True, f"two ranks cannot run: {_first_line(error)}")
    if result.outcome == "verified":
        text = f"two ranks ran a ring in {result.timing['attention_ms']:.1f} ms: verified"
        return Finding("ranks (gloo)", True, True, text)
    said = f": {result.problem.cls}: {result.problem.message}" if result.problem else ""
    text = f"two ranks ran a ring, and it was {result.outcome}{said}"
    return Finding("ranks (gloo)", False, True, text)


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cores", True, False, f"{cores} for this process")
    yield Finding("memory", True, False, f"{_memory() / 2**30:.1f} GiB")
    try:
        cap = limits()
    except InvalidScenario as error:
        yield Finding("caps", False, True, str(error))
        return
    text = (
        f"a run may take {cap.max_ranks} ranks, {cap.max_tokens:,} rows, {cap.max_seconds} s "
        "(USP_VIZ_MAX_RANKS, USP_VIZ_MAX_TOKENS, USP_VIZ_MAX_SECONDS)"
    )
    yield Finding("caps", True, True, text)


def _memory() -> int:
    """Bytes that this machine or this container has."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text("ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def _optional() -> Iterator[Finding]:
    yield _package("gradio", "pip install 'gradio>=6.20,<7'", "serves the page")
    yield _package("flash-attn", f"{GPU_EXTRA}, after torch; builds with nvcc", "backend: flash")
    yield _package("triton", "pip install triton", "backend: triton")
    absent: list[str] = []
    for name in ENGINES:
        module = f"usp_viz.engines.{name.replace('-', '_')}"
        if find_spec(module) is None:
            absent.append(name)
            continue
        lack = import_module(module).missing(Scenario.parse({"engine": name}))
        text = "; ".join(lack) if lack else "ready"
        yield Finding(f"engine {name}", lack is None, name == "builtin", text)
    if absent:
        text = f"{', '.join(absent)}: not in this version; use engine: builtin"
        yield Finding("other engines", False, False, text)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    text = browser or "makes pictures from pages: apt-get install chromium"
    yield Finding("chromium", browser is not None, False, text)


def _package(name: str, install: str, purpose: str) -> Finding:
    found = _version(name)
    return Finding(name, found is not None, False, found or f"{purpose}: {install}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_line(error: Exception) -> str:
    """A missing requirement says its install line; anything else its class as well."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    return text if isinstance(error, MissingRequirement) else f"{type(error).__name__}: {text}"
