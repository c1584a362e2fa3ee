"""The policies `sglang` and `unguarded` on a rank: raise what the release raises, or compute."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

from usp_viz import rules
from usp_viz.calls import Call
from usp_viz.engines.base import RankResult
from usp_viz.errors import NotExpressible
from usp_viz.scenario import Scenario
from usp_viz.trace import Event

if TYPE_CHECKING:
    from torch import Tensor

    from usp_viz.attention.comm import Recorder
    from usp_viz.attention.usp import LocalAttention
    from usp_viz.runtime.context import RankContext


def run_rank(context: RankContext, scenario: Scenario, memory: bool = False) -> RankResult:
    """Record the communication on ids, then run it on the real tensors.

    Raises:
        Exception: What the release raises on this rank, class and message word for word.
    """
    from usp_viz.attention.comm import Comm
    from usp_viz.attention.local import KernelAttention
    from usp_viz.attention.program import Program
    from usp_viz.attention.sglang import NarrowAttention, sglang_attention
    from usp_viz.engines.passes import Passes

    rank = context.rank
    call = Call(scenario, scenario.release, scenario.policy == "unguarded")
    program = Program.of(call, rank)
    passes = Passes(context, scenario, program.own_queries, program.own_keys, memory)
    end = rules.ending(scenario, policy=scenario.policy)
    if end is not None:
        _raise(end, passes.recorder, rank)
        return RankResult(out=None, events=tuple(passes.recorder.events), backend="sdpa")
    groups = _groups(context, program)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, recorder: Recorder, local: LocalAttention
    ) -> Tensor:
        real = q.is_floating_point()
        comm = Comm(program.mesh, rank, *groups, recorder)
        return sglang_attention(q, k, v, program, comm, local, real)

    local = NarrowAttention if program.how.narrow else KernelAttention
    return passes.run(attend, last_step=program.output_step + program.swaps, local=local)


def _groups(context: RankContext, program: Any) -> tuple[Any, Any]:
    """(Ulysses group, ring group) of this rank, None where nobody is in it but itself."""
    if program.alone or program.call.world == 1:
        return None, None
    if program.how.exchange == "world":
        return context.groups([tuple(range(program.call.world))])[0], None
    groups = context.groups(program.mesh.groups())
    ring, ulysses = program.mesh.at(context.rank)
    return groups[ring], groups[program.mesh.ring + ulysses]


def _raise(end: rules.Refusal | rules.Crash, recorder: Any, rank: int) -> None:
    """Raise what the release raises on this rank, if it does."""
    message = end.messages[rank]
    if message is None:
        return
    stage = "guard" if isinstance(end, rules.Refusal) else "crash"
    recorder.add(Event(1, stage, "raise", rank, rank, "error", (), (0, 0), 0))
    cls = NotExpressible if end.cls == "NotExpressible" else getattr(builtins, end.cls)
    raise cls(message)
