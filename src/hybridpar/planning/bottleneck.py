"""What takes longest in a step, of what could be measured or computed."""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.planning.report import ServerPlan, TrainerPlan


def bottleneck(
    servers: Sequence[ServerPlan], trainer: TrainerPlan, memory_bytes: int | None
) -> tuple[str | None, str]:
    """What limits the job, and why, in words.

    Args:
        servers: what they hold and do.
        trainer: what a trainer does.
        memory_bytes: what a server may take; None if it is not known.
    """
    fullest = max(servers, key=lambda server: server.num_bytes)
    if memory_bytes is not None and fullest.num_bytes > memory_bytes:
        return "memory", (
            f"ps{fullest.rank} needs {fullest.num_bytes:,} bytes and may take {memory_bytes:,}. "
            "Take more servers, float16 rows, or an optimizer with less state."
        )
    busiest = max(servers, key=lambda server: server.network_s or 0.0)
    slowest = max(servers, key=lambda server: server.update_s or 0.0)
    times = {
        "network": max(busiest.network_s or 0.0, trainer.network_s or 0.0),
        "servers": slowest.update_s,
        "trainers": trainer.compute_s,
    }
    known = {what: seconds for what, seconds in times.items() if seconds}
    if not known:
        return None, "a sample of ids would tell"
    most = max(known, key=known.__getitem__)
    listed = ", ".join(f"{what} {seconds * 1e3:.3g} ms" for what, seconds in known.items())
    of_trainer = (trainer.network_s or 0.0) > (busiest.network_s or 0.0)
    whose = "a trainer" if of_trainer else f"ps{busiest.rank}"
    mend = {
        "network": f"the link of {whose} carries most; "
        "wire_dtype=torch.bfloat16 or more servers would help",
        "servers": f"ps{slowest.rank} looks up and updates longest; more servers would help",
        "trainers": "more trainers with smaller batches each would help",
    }
    return most, f"a step takes at least {listed}; {mend[most]}"
