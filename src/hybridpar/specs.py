"""`RemoteEmbeddingSpec`: what a user says of one embedding table that lives on the servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from hybridpar.errors import SpecError

Mode: TypeAlias = Literal["sum", "mean"]
Sharding: TypeAlias = Literal["table_wise", "row_wise"]
Initializer: TypeAlias = Callable[[Tensor], object]


@dataclass(frozen=True, slots=True)
class RemoteEmbeddingSpec:
    """One embedding table, kept on the parameter servers as float32.

    Args:
        name: the table's name, unique in its model.
        num_embeddings: number of rows; ids run from 0 to ``num_embeddings - 1``.
        embedding_dim: number of columns.
        mode: ``"sum"`` or ``"mean"`` pools each bag of ids into one row, as
            :class:`torch.nn.EmbeddingBag` does; None gives the row of each id, as
            :class:`torch.nn.Embedding` does.
        features: names under which ``sparse_inputs`` gives ids for this table; by default one
            feature, of the table's own name. Several features may share a table.
        sharding: ``"table_wise"`` keeps the table on one server, ``"row_wise"`` spreads its rows
            over all of them; None leaves the choice to the plan.
        init: fills a tensor of shape (rows, embedding_dim) in place, like the functions of
            :mod:`torch.nn.init`; called on one block of whole rows after another, from row 0 up.
            None draws from N(0, 1), as torch does.
        seed: the initial values are those of ``torch.manual_seed(seed)`` followed by
            ``torch.nn.EmbeddingBag(num_embeddings, embedding_dim)``, however many servers there
            are. None derives a seed from trainer 0's ``torch.initial_seed()`` and the name.

    Raises:
        SpecError: if a value is out of its range.

    Example:
        >>> RemoteEmbeddingSpec("item", num_embeddings=1000, embedding_dim=64, mode="sum").features
        ('item',)
    """

    name: str
    _: KW_ONLY
    num_embeddings: int
    embedding_dim: int
    mode: Mode | None = None
    features: tuple[str, ...] = ()
    sharding: Sharding | None = None
    init: Initializer | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("A RemoteEmbeddingSpec needs a name that is not empty.")
        for what in ("num_embeddings", "embedding_dim"):
            value = getattr(self, what)
            if not isinstance(value, int) or value < 1:
                raise SpecError(
                    f"Table '{self.name}' got {what}={value!r}. Give a whole number of at least 1."
                )
        self._choice("mode", self.mode, ("sum", "mean", None))
        self._choice("sharding", self.sharding, ("table_wise", "row_wise", None))
        features: object = self.features
        if isinstance(features, str):
            raise SpecError(
                f"Table '{self.name}' got features={features!r}. Give a tuple of names, "
                f"such as features=({features!r},)."
            )
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))

    def _choice(self, what: str, value: object, choices: tuple[object, ...]) -> None:
        if value not in choices:
            known = ", ".join(map(repr, choices))
            raise SpecError(f"Table '{self.name}' got {what}={value!r}. Choose one of {known}.")


def specs_by_feature(specs: tuple[RemoteEmbeddingSpec, ...]) -> dict[str, RemoteEmbeddingSpec]:
    """The spec of the table that each feature reads, in the order of the specs.

    Raises:
        SpecError: if two specs have one name, or two tables claim one feature.
    """
    names: set[str] = set()
    by_feature: dict[str, RemoteEmbeddingSpec] = {}
    for spec in specs:
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
