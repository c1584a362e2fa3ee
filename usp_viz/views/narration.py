"""What a step is called, and why it is there: the words beside `usp_viz.frames.narrate`."""

from __future__ import annotations

from collections.abc import Sequence

from usp_viz.trace import Event


def title(stage: str, events: Sequence[Event]) -> str:
    """A step's name: ``Hop 1 · merge``."""
    ops = {event.op for event in events}
    if "raise" in ops:
        return "Crashed" if stage == "crash" else "Refused"
    if stage.startswith("hop "):
        what = "merge" if "merge" in ops else "attend" if "attend" in ops else "send"
        return f"Hop {stage.removeprefix('hop ')} · {what}"
    names = {"shard": "Shards", "output": "Done"}
    return names.get(stage, stage[:1].upper() + stage[1:])


def why(
    stage: str, events: Sequence[Event], ranks: int, hops_left: int, pairs: int, allowed: int
) -> str:
    """Why a step is needed, in one plain sentence; empty where there is nothing to add.

    Args:
        stage: The step's stage.
        events: Its events.
        ranks: P.
        hops_left: Hops after this one.
        pairs: Computed so far, by all ranks.
        allowed: All that should be computed.
    """
    ops = {event.op for event in events}
    if "raise" in ops:
        return ""
    if stage == "shard" and ranks > 1:
        return "A query needs keys that other ranks hold, so something has to move."
    if stage == "input all-to-all":
        return "Heads do not depend on each other, so each rank can attend for its heads alone."
    if stage == "output all-to-all":
        return "The next layer expects every row where it came from, with all heads."
    if stage == "output" and pairs != allowed:
        return f"{pairs:,} pairs were computed and {allowed:,} are allowed: this output is wrong."
    if stage == "output" and ranks > 1:
        return (
            "It is what one device would have computed, and no rank ever held the whole sequence."
        )
    if "merge" in ops:
        return "A partial softmax is right only for the keys it has met; its weight says how many."
    if "send" in ops and "attend" in ops:
        return "Sending while computing hides the transfer behind the work."
    if "attend" in ops and not hops_left and stage != "hop 0" and pairs == allowed:
        return "These are the last keys to meet: after this every allowed pair is computed."
    return ""


def raised(message: str, stage: str, ranks: int, who: str) -> str:
    """The sentence for the step at which a release stops.

    Args:
        message: The exception, word for word; empty when it was not run.
        stage: ``guard`` or ``crash``.
        ranks: P.
        who: Whose code it is.
    """
    does = "crashes here" if stage == "crash" else "refuses before anything is sent"
    whom = f"all {ranks} ranks raise" if ranks > 1 else "the one rank raises"
    return f"{who} {does}; {whom}" + (f" {message}" if message else ".")
