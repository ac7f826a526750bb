"""`Handover`: what a `HybridModel` offers to give its values away, or to take others."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hybridpar.trainer.exchange import Exchange
from hybridpar.trainer.handing_over.export import export
from hybridpar.trainer.handing_over.exported import ExportedModel
from hybridpar.trainer.handing_over.plain import load_plain
from hybridpar.trainer.handing_over.row_writes import write_rows
from hybridpar.trainer.tables import RemoteTables

if TYPE_CHECKING:
    from hybridpar.trainer.model import HybridModel


class Handover:
    """Mixed into :class:`HybridModel`."""

    @property
    @abstractmethod
    def _connected(self) -> RemoteTables:
        """The tables on the servers."""

    @property
    @abstractmethod
    def _connected_exchange(self) -> Exchange:
        """How this model's trainers and servers keep step."""

    def export(
        self,
        *,
        tables: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        rows: Mapping[str, Tensor] | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> ExportedModel:
        """The model as a plain module, with ordinary torch tables in place of the servers'.

        One trainer calls it, any one, between two steps: after every push of this trainer so far;
        in sync mode, of all trainers. Rows with ``max_norm`` are scaled as a lookup scales them.

        Args:
            tables: names of the tables and hosted modules to export; None takes all.
            dtype: what rows are stored as: float32, float16 or bfloat16; None leaves each table as
                it is. Whatever it is, rows are pooled as float32.
            rows: for some tables, the ids whose rows are kept. All other ids, also any out of
                range, then get one row of zeros.
            directory: a folder for the tables' rows, which are written piece by piece into a file
                a table, which the module maps into memory. For tables that are too big for one
                process. None keeps them in memory.

        Raises:
            InputError: if an id of ``rows`` is out of range.
            SpecError: if no table has a name, the dtype is wrong, or the model holds something
                that cannot be copied.
        """
        self._connected_exchange.settle()
        model = cast("HybridModel[Any]", self)
        return export(
            model, self._connected, names=tables, dtype=dtype, rows=rows, directory=directory
        )

    def set_rows(self, name: str, ids: Tensor, values: Tensor, *, reset_state: bool = True) -> None:
        """Write rows of a table on its servers, after every push of this trainer so far.

        One trainer calls it, or several with different ids, between two steps; what other trainers
        look up meanwhile may be before or after.

        Args:
            name: the table.
            ids: (U,) int32 or int64 logical rows, each once.
            values: (U, embedding_dim), floating, on any device; rounded to the table's dtype. The
                padding row stays zero whatever they are. They are not scaled to ``max_norm`` here,
                but by the next lookup.
            reset_state: whether the optimizer's state of these rows is as at the beginning again.
                False keeps it.

        Raises:
            InputError: if an id is out of range or comes twice, or the values do not fit. Nothing
                is written then.
            SpecError: if no table has the name.
        """
        self._connected_exchange.settle()
        write_rows(self._connected, name, ids, values, reset_state=reset_state)

    def load_plain(
        self, state_dict: Mapping[str, Tensor], *, tables: Mapping[str, str], strict: bool = True
    ) -> None:
        """Fill the model from a plain one's ``state_dict``. Every trainer calls it, between steps.

        The dense half takes what has its own names, as ``load_state_dict`` does. The state of the
        tables' optimizers begins anew.

        Args:
            state_dict: the plain model's, equal on all trainers.
            tables: for each table, the key of its rows, such as ``"item_table.weight"``; for each
                hosted module, the prefix of its keys, such as ``"tower"``.
            strict: whether every table, every dense parameter and every key must be used. If not,
                what is not there keeps its values.

        Raises:
            SpecError: if something is missing, left over, or of another shape; all differences are
                listed. Nothing is changed then.
        """
        self._connected_exchange.settle()
        model = cast("HybridModel[Any]", self)
        load_plain(model, self._connected, state_dict, tables, strict=strict)
