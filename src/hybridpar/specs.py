"""`RemoteEmbeddingSpec`: what a user says of one table, or module, that lives on the servers."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, Literal, NoReturn, SupportsIndex, TypeAlias

import torch
from torch import Tensor, nn

from hybridpar.counterparts import dense_name, sparse_name
from hybridpar.errors import SpecError
from hybridpar.optim import SparseOptimizerSettings

Mode: TypeAlias = Literal["sum", "mean", "max"]
Sharding: TypeAlias = Literal["table_wise", "row_wise", "column_wise"]
Initializer: TypeAlias = Callable[[Tensor], object]
InitialValues: TypeAlias = "Initializer | Tensor | str | os.PathLike[str]"
ModuleOptimizer: TypeAlias = Callable[[Any], torch.optim.Optimizer]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class RemoteEmbeddingSpec:
    """One embedding table on the parameter servers; or, with ``module``, any module there.

    Args:
        name: the table's name, unique in its model.
        num_embeddings: number of rows; ids run from 0 to ``num_embeddings - 1``.
        embedding_dim: number of columns.
        mode: ``"sum"``, ``"mean"`` or ``"max"`` pools each bag of ids into one row, as
            :class:`torch.nn.EmbeddingBag` does; None gives every id's row, as
            :class:`torch.nn.Embedding` does.
        features: names under which ``sparse_inputs`` gives ids for this table; by default one
            feature, of the table's own name. Several features may share a table.
        padding_idx: an id that counts as no id: its row stays zero, pools skip it, and it gets no
            gradient. Negative counts from the end.
        max_norm: a looked-up row with a larger norm is scaled down to it first, on the server, as
            torch does. Keeps the table from being spread column-wise.
        norm_type: the p of that norm.
        dtype: how the servers store the rows: float32, float16 or bfloat16. Whatever it is, rows
            travel, pool and are updated as float32, and optimizer state is float32.
        init: the values to start from: a function that fills a tensor of shape (rows,
            embedding_dim) in place, like those of :mod:`torch.nn.init`, called on one block of
            whole rows after another, from row 0 up; or a tensor of shape (num_embeddings,
            embedding_dim); or the path of a file that every server can read, in which
            :func:`torch.save` wrote one. None draws from N(0, 1), as torch does.
        seed: the initial values are those of ``torch.manual_seed(seed)`` followed by
            ``torch.nn.EmbeddingBag(num_embeddings, embedding_dim)``, or by building the module,
            however many servers there are. None derives a seed from trainer 0's
            ``torch.initial_seed()`` and the name.
        sharding: ``"table_wise"`` keeps the table on one server, ``"row_wise"`` spreads its rows
            over all of them, ``"column_wise"`` its columns; None leaves the choice to the plan.
        pooling_factor: about how many ids a sample has. None lets the plan go by bytes alone.
        optimizer: for a table, settings from :mod:`hybridpar.optim` that take the place of the
            model's; for a module, a function from its parameters to a torch optimizer.
        trainable: False freezes it from the start; :meth:`HybridModel.freeze` and
            :meth:`~HybridModel.unfreeze` change that later.
        module: a class of :class:`torch.nn.Module`, or a function that returns one. A server
            builds ``module(*args, **kwargs)``, runs its forward on what ``sparse_inputs`` gives
            for the feature, takes the gradient back, and steps its optimizer.
        args: for ``module``.
        kwargs: for ``module``.

    Raises:
        SpecError: if a value is out of its range, or does not go with another.

    Example:
        >>> RemoteEmbeddingSpec("item", num_embeddings=1000, embedding_dim=64, mode="sum").features
        ('item',)
        >>> tower = RemoteEmbeddingSpec("tower", module=torch.nn.Linear, args=(8, 4),
        ...                             optimizer=torch.optim.Adam)
    """

    name: str
    _: KW_ONLY
    num_embeddings: int = 0
    embedding_dim: int = 0
    mode: Mode | None = None
    features: tuple[str, ...] = ()
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    dtype: torch.dtype = torch.float32
    init: InitialValues | None = field(default=None, compare=False)
    seed: int | None = None
    sharding: Sharding | None = None
    pooling_factor: float | None = None
    optimizer: SparseOptimizerSettings | ModuleOptimizer | None = None
    trainable: bool = True
    module: Callable[..., nn.Module] | None = None
    args: tuple[Any, ...] = field(default=(), compare=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not name:
            raise SpecError(f"A RemoteEmbeddingSpec needs a name that is not empty, not {name!r}.")
        self._check_features()
        kinds = {"args": ((tuple, list), "a tuple"), "kwargs": (Mapping, "a dict"),
                 "trainable": (bool, "True or False")}  # fmt: skip
        for what, (kind, wanted) in kinds.items():
            if not isinstance(getattr(self, what), kind):  # type: ignore[arg-type]
                self._refuse(what, wanted)
        seed = 0 if self.seed is None else _whole(self.seed)
        if seed is None or not -(2**63) <= seed < 2**64:
            self._refuse("seed", "a whole number that torch.manual_seed takes, or None")
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "kwargs", dict(self.kwargs))
        if self.module is not None:
            self._check_module()
        else:
            self._check_table()

    def _check_features(self) -> None:
        given: object = self.features
        if isinstance(given, str):
            self._refuse("features", f"a tuple of names, such as features=({given!r},)")
        names = given if isinstance(given, Iterable) else [None]
        features = tuple(names) or (self.name,)
        if not all(isinstance(feature, str) and feature for feature in features):
            self._refuse("features", "a tuple of names, such as features=('item', 'basket')")
        if len(set(features)) < len(features):
            self._refuse("features", "each name once")
        object.__setattr__(self, "features", features)

    def _check_table(self) -> None:
        for what in ("num_embeddings", "embedding_dim"):
            value = _whole(getattr(self, what))
            if value is None or value < 1:
                self._refuse(what, "a whole number of at least 1")
            object.__setattr__(self, what, value)
        self._choice("mode", ("sum", "mean", "max", None))
        self._choice("sharding", ("table_wise", "row_wise", "column_wise", None))
        self._choice("dtype", _DTYPES)
        if self.args or self.kwargs:
            self._refuse("args", "them together with module=, which they are for")
        if self.padding_idx is not None:
            rows = self.num_embeddings
            padding_idx = _whole(self.padding_idx)
            if padding_idx is None or not -rows <= padding_idx < rows:
                self._refuse("padding_idx", f"an id within the {rows} rows")
            object.__setattr__(self, "padding_idx", padding_idx % rows)
        for what in ("max_norm", "pooling_factor"):
            if getattr(self, what) is not None and not _is_size(getattr(self, what)):
                self._refuse(what, "a finite number above 0, or None")
        if not _is_size(self.norm_type) and self.norm_type != math.inf:
            self._refuse("norm_type", "a number above 0")
        self._check_init()
        optimizer: object = self.optimizer
        if optimizer is not None and not isinstance(optimizer, SparseOptimizerSettings):
            self._refuse(
                "optimizer", f"the settings hybridpar.optim.{sparse_name(optimizer)}(lr=...)"
            )

    def _check_init(self) -> None:
        init: object = self.init
        if not (init is None or callable(init) or isinstance(init, (Tensor, str, os.PathLike))):
            self._refuse("init", "a function that fills a tensor, a tensor, or a file's path")
        if isinstance(init, Tensor) and (init.is_meta or init.is_complex()):
            self._refuse("init", "a tensor of real numbers that has values")
        shape = (self.num_embeddings, self.embedding_dim)
        if isinstance(self.init, Tensor) and tuple(self.init.shape) != shape:
            raise SpecError(
                f"Table '{self.name}' got init of shape {tuple(self.init.shape)}. Give a tensor of "
                f"shape {shape}, its num_embeddings and embedding_dim."
            )

    def _check_module(self) -> None:
        if not callable(self.module):
            self._refuse("module", "a class of torch.nn.Module, or a function that returns one")
        optimizer: object = self.optimizer
        if isinstance(optimizer, SparseOptimizerSettings) or not callable(optimizer):
            name = dense_name(optimizer)
            self._refuse(
                "optimizer", f"a module a function of its parameters, such as torch.optim.{name}"
            )
        defaults = {"num_embeddings": 0, "embedding_dim": 0, "mode": None, "padding_idx": None,
                    "max_norm": None, "init": None, "sharding": None, "norm_type": 2.0,
                    "dtype": torch.float32, "pooling_factor": None}  # fmt: skip
        for what, default in defaults.items():
            if getattr(self, what) != default:
                self._refuse(what, "it to the module itself, by args or kwargs")

    def _choice(self, what: str, choices: tuple[object, ...]) -> None:
        if getattr(self, what) not in choices:
            self._refuse(what, "one of " + ", ".join(map(repr, choices)))

    def _refuse(self, what: str, wanted: str) -> NoReturn:
        kind = "Table" if self.module is None else "Module"
        raise SpecError(f"{kind} '{self.name}' got {what}={getattr(self, what)!r}. Give {wanted}.")


def _whole(value: object) -> int | None:
    """A whole number, which may be another library's; None if it is none, as True and False are."""
    if isinstance(value, (bool, Tensor)) or not isinstance(value, SupportsIndex):
        return None
    return operator.index(value)


def _is_size(value: object) -> bool:
    """Whether a value is a finite number above 0."""
    return not isinstance(value, bool) and isinstance(value, Real) and 0 < float(value) < math.inf


def specs_by_feature(specs: tuple[RemoteEmbeddingSpec, ...]) -> dict[str, RemoteEmbeddingSpec]:
    """The spec of the table that each feature reads, in the order of the specs.

    Raises:
        SpecError: if one is no spec, two have one name, or two tables claim one feature.
    """
    names: set[str] = set()
    by_feature: dict[str, RemoteEmbeddingSpec] = {}
    for spec in specs:
        given: object = spec
        if not isinstance(given, RemoteEmbeddingSpec):
            raise SpecError(
                f"HybridModel got a {type(given).__name__} where a spec goes. Give it the specs "
                "one after another: super().__init__(spec_a, spec_b), or (*specs)."
            )
        if spec.name in names:
            raise SpecError(f"Two specs are named '{spec.name}'. Give every table its own name.")
        names.add(spec.name)
        for feature in spec.features:
            if feature in by_feature:
                raise SpecError(
                    f"Feature '{feature}' is claimed by tables '{by_feature[feature].name}' and "
                    f"'{spec.name}'. A feature reads one table: rename one of the two."
                )
            by_feature[feature] = spec
    return by_feature
