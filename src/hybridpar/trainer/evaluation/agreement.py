"""Settings that must be alike on all trainers, compared before they lead to different calls."""

from __future__ import annotations

from hybridpar.errors import SpecError
from hybridpar.trainer.tables import RemoteTables


def check_alike(tables: RemoteTables, where: str, settings: dict[str, object]) -> None:
    """Wait for all trainers, and refuse, on all of them, settings that are not alike. Collective.

    Args:
        tables: the model's.
        where: what is about to begin, such as ``"evaluation 3"``.
        settings: by name; equal where their ``repr`` is.

    Raises:
        SpecError: names the first that differs, with two trainers' values.
    """
    ctx = tables.ctx
    if ctx.num_trainers == 1:
        return
    mine = {name: repr(value) for name, value in settings.items()}
    every: dict[int, dict[str, str]] = tables.master.send(
        "compare", tables.model_id, ctx.rank, f"the beginning of {where}", mine
    ).wait(patiently=True)
    for rank, theirs in every.items():
        for name, value in theirs.items():
            if value != every[0][name]:
                raise SpecError(
                    f"{where} got {name}={every[0][name]} on trainer0, and {value} on "
                    f"trainer{rank}. Give every trainer the same; only the batches are its own."
                )
