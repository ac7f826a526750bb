"""Settings of the sparse optimizers, whose updates run on the parameter servers.

A setting says *which* rule updates a table's rows and with which numbers; the rules themselves are
in ``hybridpar.server.rules``. A rule reads and writes the rows that a step touched and no others:
weight decay, momentum and moments of the other rows wait until a batch names them again.

    >>> from hybridpar import optim
    >>> optim.RowWiseAdagrad(lr=0.05, weight_decay=1e-4).lr
    0.05
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import ClassVar

from typing_extensions import override

from hybridpar.errors import SpecError

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "RMSprop",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "SparseOptimizerSettings",
]

ELEMENT, ROW = "element", "row"  # how much state a rule keeps: a value a weight, or one a row


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseOptimizerSettings:
    """What every sparse optimizer setting has.

    Args:
        lr: learning rate. torch's schedulers change it through ``param_groups``.
        weight_decay: L2 penalty: ``weight_decay * row`` is added to a touched row's gradient.
        clip_value: each entry of a touched row's gradient is clamped to ``[-clip_value,
            clip_value]``, as :func:`torch.nn.utils.clip_grad_value_` does.
        clip_norm: a table's gradient, all its touched rows together, is scaled down to this norm
            if it is above, as :func:`torch.nn.utils.clip_grad_norm_` does. Costs one more round
            trip a step.

    Raises:
        SpecError: if a number is out of its range.
    """

    lr: float
    weight_decay: float = 0.0
    clip_value: float | None = None
    clip_norm: float | None = None

    state: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("clip_value", "clip_norm"):
                if value is not None and not (_is_number(value) and value > 0):
                    self._refuse(field.name, value, "a finite number above 0, or None")
            elif str(field.type) == "float" and not (_is_number(value) and value >= 0):
                self._refuse(field.name, value, "a finite number that is not negative")
            elif str(field.type) == "bool" and not isinstance(value, bool):
                self._refuse(field.name, value, "True or False")

    def state_widths(self, embedding_dim: int) -> dict[str, int]:
        """The rule's state: for each name, how many float32 values it keeps for a row."""
        return {name: embedding_dim if kind == ELEMENT else 1 for name, kind in self.state.items()}

    def initial_state(self, name: str) -> float:  # noqa: ARG002 - for rules that have several
        """The value that the state ``name`` starts from."""
        return 0.0

    @property
    def row_wise(self) -> bool:
        """Whether an update mixes the columns of a row, so that they must lie on one server."""
        return self.clip_norm is not None or ROW in self.state.values()

    def _refuse(self, name: str, value: object, wanted: str) -> None:
        raise SpecError(f"{type(self).__name__} got {name}={value!r}. Give {wanted}.")


def _is_number(value: object) -> bool:
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and math.isfinite(value)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(SparseOptimizerSettings):
    """Stochastic gradient descent on the touched rows, as :class:`torch.optim.SGD`.

    ``g += weight_decay * row``; with momentum ``buf = momentum * buf + g`` (state
    ``"momentum_buffer"``) and ``g = buf``, or ``g += momentum * buf`` if ``nesterov``; then
    ``row -= lr * g``.

    Args:
        momentum: 0 keeps no state.
        nesterov: look ahead along the momentum.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    nesterov: bool = False

    @override
    def __post_init__(self) -> None:
        SparseOptimizerSettings.__post_init__(self)
        if self.nesterov and not self.momentum:
            self._refuse("nesterov", True, "a momentum above 0 with it")

    @override
    def state_widths(self, embedding_dim: int) -> dict[str, int]:
        return {"momentum_buffer": embedding_dim} if self.momentum else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(SparseOptimizerSettings):
    """Adagrad on the touched rows, as :class:`torch.optim.Adagrad`.

    Every weight has a sum of its squared gradients (state ``"sum"``): ``sum += g**2``, then
    ``row -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(sum) + eps)``, with t the number of steps so
    far, this one included. Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods", JMLR
    2011.

    Args:
        lr_decay: how fast the learning rate falls.
        eps: added to the root, against division by zero.
        initial_accumulator_value: what every sum starts from.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    state: ClassVar[dict[str, str]] = {"sum": ELEMENT}

    @override
    def initial_state(self, name: str) -> float:
        return self.initial_accumulator_value


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdagrad(SparseOptimizerSettings):
    """Adagrad with one accumulator a row (state ``"sum"``, one float32 a row).

    ``sum += mean(g**2)`` over the row's columns, then ``row -= lr * g / (sqrt(sum) + eps)``: the
    state of a table shrinks by a factor of ``embedding_dim``. Source: TorchRec's and FBGEMM's
    ``EXACT_ROWWISE_ADAGRAD``; Gupta et al., "Training Recommender Systems at Scale", 2020.

    Args:
        eps: added to the root, against division by zero.
        initial_accumulator_value: what every sum starts from.
    """

    lr: float = 1e-2
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    state: ClassVar[dict[str, str]] = {"sum": ROW}

    @override
    def initial_state(self, name: str) -> float:
        return self.initial_accumulator_value


@dataclass(frozen=True, kw_only=True, slots=True)
class _AdamSettings(SparseOptimizerSettings):
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    state: ClassVar[dict[str, str]] = {"exp_avg": ELEMENT, "exp_avg_sq": ELEMENT}

    @override
    def __post_init__(self) -> None:
        SparseOptimizerSettings.__post_init__(self)
        given: object = self.betas
        betas = given if isinstance(given, (tuple, list)) else ()
        if len(betas) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas):
            self._refuse("betas", given, "two numbers from 0 to below 1")
        object.__setattr__(self, "betas", tuple(self.betas))


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(_AdamSettings):
    """Adam on the touched rows, as :class:`torch.optim.SparseAdam` does it.

    ``exp_avg`` and ``exp_avg_sq`` (states of those names) move for the touched rows alone. The bias
    correction ``1 - beta**t`` uses t, the number of steps so far, this one included, and not how
    often the row was touched: a row that is touched first at step t starts from moments of zero
    with next to no correction, and so moves by up to a factor of
    ``(1 - beta1) / sqrt(1 - beta2)`` (about 3) further than ``lr``. With every row touched in every
    step this is :class:`torch.optim.Adam`. Source: Kingma and Ba, "Adam", ICLR 2015.

    Args:
        betas: how much of the two moments is kept.
        eps: added to the root, against division by zero.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(_AdamSettings):
    """Adam with decoupled weight decay on the touched rows, as :class:`torch.optim.AdamW`.

    ``row *= 1 - lr * weight_decay``, then as :class:`Adam`, whose bias correction it shares. A row
    decays in the steps that touch it. Source: Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization", ICLR 2019.

    Args:
        betas: how much of the two moments is kept.
        eps: added to the root, against division by zero.
    """

    weight_decay: float = 1e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdam(_AdamSettings):
    """Adam with one second moment a row: FBGEMM's ``PARTIAL_ROWWISE_ADAM``.

    ``exp_avg`` is kept for every weight, ``exp_avg_sq`` for every row, from the mean of the row's
    squared gradients. Bias correction as in :class:`Adam`.

    Args:
        betas: how much of the two moments is kept.
        eps: added to the root, against division by zero.
    """

    state: ClassVar[dict[str, str]] = {"exp_avg": ELEMENT, "exp_avg_sq": ROW}


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSprop(SparseOptimizerSettings):
    """RMSprop on the touched rows, as :class:`torch.optim.RMSprop`.

    ``square_avg = alpha * square_avg + (1 - alpha) * g**2``, then
    ``row -= lr * g / (sqrt(square_avg) + eps)``. Source: Tieleman and Hinton, Coursera lecture 6.5,
    2012.

    Args:
        alpha: how much of the average is kept.
        eps: added to the root, against division by zero.
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8

    state: ClassVar[dict[str, str]] = {"square_avg": ELEMENT}

    @override
    def __post_init__(self) -> None:
        SparseOptimizerSettings.__post_init__(self)
        if self.alpha > 1:
            self._refuse("alpha", self.alpha, "a number from 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class FTRL(SparseOptimizerSettings):
    """FTRL-Proximal on the touched rows, a value at a time.

    With ``sigma = (sqrt(n + g**2) - sqrt(n)) / lr``: ``z += g - sigma * row``, ``n += g**2``, then
    ``row = 0`` where ``|z| <= l1``, elsewhere
    ``row = -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)``. States ``"z"`` and ``"n"``.
    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1.
    There weights start from zero; here too they should: ``init=torch.nn.init.zeros_``.

    Args:
        l1: weights whose evidence stays below it are exactly zero.
        l2: pulls weights to zero.
        beta: steadies the first steps.
    """

    lr: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0

    state: ClassVar[dict[str, str]] = {"z": ELEMENT, "n": ELEMENT}

    @override
    def __post_init__(self) -> None:
        SparseOptimizerSettings.__post_init__(self)
        if self.lr == 0:
            self._refuse("lr", 0, "a number above 0: FTRL divides by it")
