"""Our own attention: the `extended` policy, and what an sglang release computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from usp_viz.engines.base import RankResult
from usp_viz.scenario import Scenario

if TYPE_CHECKING:
    from torch import Tensor

    from usp_viz.attention.comm import Recorder
    from usp_viz.attention.usp import LocalAttention
    from usp_viz.runtime.context import RankContext

NAME = "builtin"
ENTRY = "usp_viz.engines.builtin:run_rank"


def missing(scenario: Scenario) -> tuple[str, str] | None:
    """What this machine lacks for the scenario's backend."""
    backend = scenario.attention.backend
    if backend == "flash":
        return (
            "backend: flash needs flash-attn and a CUDA GPU",
            "pip install 'usp-viz[gpu]', or use backend: auto",
        )
    if backend == "triton":
        return (
            "backend: triton needs triton and a CUDA GPU",
            "pip install 'usp-viz[gpu]', or use backend: auto",
        )
    return None


def run_rank(context: RankContext, payload: dict[str, Any]) -> RankResult:
    """Run ``payload["scenario"]``, a normalised scenario, under its own policy."""
    scenario, memory = Scenario.parse(payload["scenario"]), bool(payload.get("memory"))
    if scenario.policy != "extended":
        from usp_viz.engines import release

        return release.run_rank(context, scenario, memory)

    from usp_viz.attention.comm import Comm
    from usp_viz.attention.schedule import Schedule
    from usp_viz.attention.usp import usp_attention
    from usp_viz.engines.passes import Passes

    schedule = Schedule.of(scenario, context.rank)
    mesh = schedule.mesh
    groups = context.groups(mesh.groups()) if mesh.ranks > 1 and not schedule.local else None
    ulysses_group = groups and groups[schedule.ring]
    ring_group = groups and groups[mesh.ring + schedule.ulysses]

    def attend(
        q: Tensor, k: Tensor, v: Tensor, recorder: Recorder, local: LocalAttention
    ) -> Tensor:
        comm = Comm(mesh, context.rank, ulysses_group, ring_group, recorder)
        return usp_attention(q, k, v, schedule, comm, local)

    swaps = mesh.ulysses > 1 and not schedule.local
    passes = Passes(context, scenario, schedule.own_queries, schedule.own_keys, memory)
    return passes.run(attend, last_step=schedule.output_step + swaps)
