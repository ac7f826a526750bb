"""How many samples a batch has: what callbacks count, and what a loss is weighted by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hybridpar.errors import SpecError
from hybridpar.trainer.context import TrainerContext


class SampleCount:
    """Counts by the user's rule, or by the first dimension of what comes with a batch.

    Args:
        ctx: this trainer's context.
        given: called with a batch, returns how many samples it has; None if there is no rule.
    """

    def __init__(self, ctx: TrainerContext, given: Callable[[Any], int] | None) -> None:
        self._ctx = ctx
        self._given = given

    def of(self, batch: object, *values: object) -> int | None:
        """How many samples a batch has; None if nothing tells.

        Args:
            batch: what the rule is given.
            values: without a rule, the first of these that holds a tensor with a row a sample.

        Raises:
            SpecError: if the rule returns no whole number.
        """
        if self._given is None:
            return _first(values)
        samples = self._given(batch)
        if not isinstance(samples, int) or samples < 0:
            raise SpecError(
                f"samples returned {samples!r} on {self._ctx.name}. Return how many samples the "
                "batch has: a whole number."
            )
        return samples


def _first(value: object) -> int | None:
    """The length of the first tensor in it that has one; None if there is none."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else None
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if not isinstance(value, (tuple, list)):
        return None
    return next((length for length in map(_first, value) if length is not None), None)
