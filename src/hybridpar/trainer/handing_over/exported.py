"""`ExportedModel`: a trained model in one process, without servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hybridpar.errors import InputError, SpecError
from hybridpar.specs import RemoteEmbeddingSpec, specs_by_feature
from hybridpar.trainer.handing_over.exported_table import ExportedTable, MappedRows

if TYPE_CHECKING:
    from hybridpar.trainer.model import HybridModel


class ModulesByName(nn.Module):
    """Modules under any names, also such as no attribute can have.

    Args:
        modules: by name. In a ``state_dict`` what no identifier has becomes ``_``.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._keys: dict[str, str] = {}
        for name, module in modules.items():
            key = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
            while hasattr(self, key):
                key += "_"
            self.add_module(key, module)
            self._keys[name] = key

    def __getitem__(self, name: str) -> nn.Module:
        return self.get_submodule(self._keys[name])

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, name: str) -> str:
        """The name of a module in the ``state_dict``."""
        return self._keys[name]


class ExportedModel(nn.Module):
    """What :meth:`HybridModel.export` returns: a plain module that scores batches by itself.

    It calls the model's own ``sparse_inputs`` and ``forward``, with rows out of tables of its own.
    :func:`torch.save`, :func:`torch.export.export` and, with tables in memory,
    ``torch.onnx.export`` take it. It is in eval mode at first, and on the CPU.

    Attributes:
        model: a copy of the :class:`HybridModel`, connected to nothing.
        tables: for each table's name, a module whose ``rows`` are an :class:`torch.nn.Embedding` or
            :class:`torch.nn.EmbeddingBag`; for each hosted module's name, that module.

    Example:
        >>> def train(ctx):
        ...     loop = TrainerLoop(Recommender(), ctx, ...)
        ...     loop.fit(batches)
        ...     if ctx.rank == 0:
        ...         torch.save(loop.model.export(), "recommender.pt")
        >>> def score(batch):  # in another process
        ...     exported = torch.load("recommender.pt", weights_only=False)
        ...     with torch.no_grad():
        ...         return exported(batch)
    """

    def __init__(
        self,
        model: HybridModel[Any],
        specs: tuple[RemoteEmbeddingSpec, ...],
        modules: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        self.model = model
        self.tables = ModulesByName(modules)
        self._specs_by_feature = specs_by_feature(specs)

    @override
    def forward(self, batch: Any) -> Any:
        """The model's output for a batch.

        Raises:
            InputError: if the batch is refused, as in training; or if the model's forward needs a
                feature whose table was not exported.
        """
        embeddings = self.embeddings(batch)
        try:
            return self.model(embeddings, batch)
        except KeyError as error:
            spec = self._specs_by_feature.get(str(error.args[0]) if error.args else "")
            if spec is None or spec.name in self.tables:
                raise
            raise InputError(
                f"The model's forward needs feature {error}, whose table '{spec.name}' was not "
                "exported. Name it in export(tables=...)."
            ) from error

    def embeddings(self, batch: Any) -> dict[str, Tensor]:
        """The embeddings of a batch, by feature; those of tables not exported are left out.

        Raises:
            InputError: if the batch is refused, as in training.
        """
        where = _device_of(self.model)
        found = {}
        for feature, value in self.model.sparse_inputs(batch).items():
            spec = self._specs_by_feature.get(feature)
            if spec is None:
                known = ", ".join(map(repr, self._specs_by_feature))
                raise InputError(
                    f"sparse_inputs gave feature '{feature}', which no spec names. The specs name "
                    f"{known}."
                )
            if spec.name not in self.tables:
                continue
            module = self.tables[spec.name]
            if isinstance(module, ExportedTable):
                result = module(feature, value)
            else:
                inputs = value if isinstance(value, tuple) else (value,)
                result = module(*(_moved(given, _device_of(module)) for given in inputs))
            found[feature] = _moved(result, where)
        return found

    def plain_state_dict(self, tables: Mapping[str, str]) -> dict[str, Tensor]:
        """The whole model under the names of a plain one: what ``plain.load_state_dict`` takes.

        The counterpart of :meth:`HybridModel.load_plain`.

        Args:
            tables: for each table, the key of its rows, such as ``"item_table.weight"``; for each
                hosted module, the prefix of its keys, such as ``"tower"``.

        Raises:
            SpecError: if a name is not that of an exported table, or a table is left out.
        """
        wrong = set(tables) ^ set(self.tables._keys)
        if wrong:
            raise SpecError(
                f"tables names {sorted(tables)}, and the exported tables are "
                f"{sorted(self.tables._keys)}. They differ by {sorted(wrong)}."
            )
        state = dict(self.model.state_dict())
        for name, key in tables.items():
            module = self.tables[name]
            if isinstance(module, ExportedTable):
                state[key] = module.weight.detach()
            else:
                state |= {f"{key}.{own}": value for own, value in module.state_dict().items()}
        return state

    def move_tables(self, directory: str | os.PathLike[str]) -> None:
        """Say where the files of ``export(directory=...)`` are now, if they were moved."""
        for module in self.modules():
            if isinstance(module, MappedRows):
                module.move(Path(directory))


def _device_of(module: nn.Module) -> torch.device | None:
    """Where a module's parameters are; None if it has none."""
    first = next(module.parameters(), None)
    return None if first is None else first.device


def _moved(value: Any, device: torch.device | None) -> Any:
    return value if device is None else value.to(device)
