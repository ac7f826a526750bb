"""The train function of test_profile. Imports no test tool."""

from __future__ import annotations

import contextlib
import io

import hybridpar as hp
from faulty import make_loop
from worlds import make_batch


def train(ctx: hp.TrainerContext, consistency: str) -> tuple[hp.FitResult, str]:
    """The result, and what was printed."""
    loop = make_loop(ctx, consistency=consistency, average_by="ddp")
    batches = [make_batch(1000 * step + ctx.rank, bags=True) for step in range(30)]
    assert loop.fit(batches[:3]).profile is None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = loop.fit(batches, profile=True)
    return result, printed.getvalue()
