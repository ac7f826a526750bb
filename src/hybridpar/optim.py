"""Settings of the sparse optimizers, whose updates run on the parameter servers.

A setting says *which* rule updates a table's rows and with which numbers; the rules themselves are
in ``hybridpar.server.rules``. A rule reads and writes the rows that a step touched and no others.

    >>> from hybridpar import optim
    >>> optim.RowWiseAdagrad(lr=0.05)
    RowWiseAdagrad(lr=0.05, eps=1e-10, initial_accumulator_value=0.0)
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from hybridpar.errors import SpecError

__all__ = ["SGD", "Adagrad", "RowWiseAdagrad", "SparseOptimizerSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseOptimizerSettings:
    """What every sparse optimizer setting has.

    Args:
        lr: learning rate, a positive number or zero.

    Raises:
        SpecError: if ``lr`` is negative.
    """

    lr: float

    def __post_init__(self) -> None:
        self._require(self.lr >= 0, "lr", self.lr)

    def state_widths(self, embedding_dim: int) -> dict[str, int]:
        """The rule's state: for each name, how many float32 values it keeps for a row."""
        raise NotImplementedError

    def initial_state(self, name: str) -> float:
        """The value that the state ``name`` starts from."""
        raise NotImplementedError

    def _require(self, condition: bool, name: str, value: float) -> None:
        if not condition:
            raise SpecError(
                f"{type(self).__name__} got {name}={value}. Give a value that is not negative."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(SparseOptimizerSettings):
    """Plain stochastic gradient descent: ``row -= lr * gradient``, as :class:`torch.optim.SGD`.

    Args:
        lr: learning rate.
    """

    lr: float = 1e-3

    @override
    def state_widths(self, embedding_dim: int) -> dict[str, int]:
        return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _AdagradSettings(SparseOptimizerSettings):
    lr: float = 1e-2
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    @override
    def __post_init__(self) -> None:
        SparseOptimizerSettings.__post_init__(self)
        self._require(self.eps >= 0, "eps", self.eps)
        accumulator = self.initial_accumulator_value
        self._require(accumulator >= 0, "initial_accumulator_value", accumulator)

    @override
    def initial_state(self, name: str) -> float:
        return self.initial_accumulator_value


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(_AdagradSettings):
    """Adagrad on the touched rows, as :class:`torch.optim.Adagrad`.

    Every weight has a sum of its squared gradients (state ``"sum"``, one float32 a weight):
    ``sum += g**2``, then ``row -= lr * g / (sqrt(sum) + eps)``. Source: Duchi, Hazan and Singer,
    "Adaptive Subgradient Methods", JMLR 2011.

    Args:
        lr: learning rate.
        eps: added to the root, against division by zero.
        initial_accumulator_value: what every sum starts from.
    """

    @override
    def state_widths(self, embedding_dim: int) -> dict[str, int]:
        return {"sum": embedding_dim}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdagrad(_AdagradSettings):
    """Adagrad with one accumulator a row (state ``"sum"``, one float32 a row).

    ``sum += mean(g**2)`` over the row's columns, then ``row -= lr * g / (sqrt(sum) + eps)``: the
    state of a table shrinks by a factor of ``embedding_dim``. Source: TorchRec's and FBGEMM's
    ``EXACT_ROWWISE_ADAGRAD``; Gupta et al., "Training Recommender Systems at Scale", 2020.

    Args:
        lr: learning rate.
        eps: added to the root, against division by zero.
        initial_accumulator_value: what every sum starts from.
    """

    @override
    def state_widths(self, embedding_dim: int) -> dict[str, int]:
        return {"sum": 1}
