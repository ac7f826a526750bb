"""`Slab`: the shards of one kind on one server, as one matrix with one optimizer.

Shapes: R rows of the slab, N ids, B bags, U distinct rows among the ids, D columns.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.checkpoint.files import write_rows
from hybridpar.checkpoint.manifest import ROWS, ShardEntry
from hybridpar.kernels import add_bags, add_rows, are_compiled, gather_rows, pool_rows
from hybridpar.kernels.compiled import step_rows
from hybridpar.messages import WEIGHT, SlabLookup, SlabPush
from hybridpar.server.compiled_rules import compiled_step
from hybridpar.server.gradients import BagGradients, RowGradients, by_row, of_bags
from hybridpar.server.initial_values import fill
from hybridpar.server.lanes import ONE_LANE, Lanes
from hybridpar.server.rules import is_linear, needs_rows, rule_for
from hybridpar.server.saved_rows import SavedRows
from hybridpar.server.snapshot import Snapshot
from hybridpar.sharding import SlabLayout
from hybridpar.shared_memory import Handle, Segment, as_tensor, new_segment, private_memory
from hybridpar.specs import RemoteEmbeddingSpec


class Slab:
    """Rows of several tables under one another, read and updated together.

    Args:
        layout: which shards lie where, and how they are stored and updated.
        specs: the tables, by name.
        model_seed: what tables without a seed derive theirs from.
    """

    def __init__(
        self, layout: SlabLayout, specs: Mapping[str, RemoteEmbeddingSpec], model_seed: str
    ) -> None:
        self._kind = layout.kind
        self._settings = layout.kind.settings
        self._rule = rule_for(self._settings)
        self._linear = is_linear(self._settings)
        self._needs_rows = needs_rows(self._settings)
        self._compiled = are_compiled() and layout.kind.dtype == torch.float32
        self._parts = layout.parts
        self._snapshot: Snapshot | None = None
        self._touched: Tensor | None = None  # (R,) bool: since the last checkpoint, if it matters
        self._touched_rows: Tensor | None = None
        self._renorm_lock = threading.Lock()
        columns = layout.kind.num_columns
        # A lookup of a table with max_norm writes, so only the server does it.
        self.weight, self._segment = _table_memory(
            (layout.num_rows, columns), layout.kind.dtype, share=layout.kind.max_norm is None
        )
        for part in layout.parts:
            rows = self.weight[part.first_row : part.first_row + part.num_rows]
            fill(rows, specs[part.table], part, model_seed)
        self.state = {
            name: _filled((layout.num_rows, width), self._settings.initial_state(name))
            for name, width in self._settings.state_widths(columns).items()
        }

    @property
    def clips_norm(self) -> bool:
        """Whether its gradient is scaled by a norm that spans servers."""
        return self._settings.clip_norm is not None

    @property
    def handle(self) -> Handle | None:
        """By which a trainer on this machine reads the weight itself; None if it must ask."""
        return None if self._segment is None else self._segment.handle

    def lookup(self, lookup: SlabLookup) -> Tensor:
        """The sum of each bag's rows: (B, D) float32; an empty bag gives zeros."""
        if self._kind.max_norm is not None and lookup.indices.numel():
            self._before_change(lookup.indices)
            with self._renorm_lock:  # two trainers' lookups must not scale a row twice
                torch.embedding_renorm_(
                    self.weight, lookup.indices, self._kind.max_norm, self._kind.norm_type
                )
        return pool_rows(self.weight, lookup.indices, lookup.offsets)

    def apply(
        self,
        pushes: Sequence[SlabPush],
        *,
        lr: float,
        divisor: int,
        t: int,
        scale: float = 1.0,
        lanes: Lanes = ONE_LANE,
    ) -> None:
        """One optimizer step with the mean over trainers of their gradients.

        Args:
            pushes: every trainer's gradients, in rank order.
            lr: learning rate.
            divisor: what the sum of the gradients is divided by.
            t: how many steps there have been, this one included.
            scale: what the gradient is multiplied by, to clip its norm.
            lanes: does parts of a large update at once.
        """
        gradients = [gradient for gradient in map(of_bags, pushes) if len(gradient.indices)]
        if not gradients:
            return
        for gradient in gradients:
            self._before_change(gradient.indices)
        count = lanes.count_for(sum(gradient.indices.numel() for gradient in gradients))
        if self._linear and self._kind.dtype == torch.float32:
            factor = -lr / divisor
            lanes.run(lambda number: self._add(gradients, factor, number, count), count)
        else:
            part, factor = by_row(gradients, count), scale / divisor
            lanes.run(lambda number: self._apply_rule(part(number), lr, t, factor), count)

    def _add(self, gradients: Sequence[BagGradients], factor: float, part: int, parts: int) -> None:
        for indices, offsets, grads in gradients:
            add_bags(self.weight, indices, offsets, grads, factor, part=part, parts=parts)

    def _apply_rule(self, gradients: RowGradients, lr: float, t: int, factor: float) -> None:
        step = compiled_step(self._settings, lr, t) if self._compiled else None
        if step is not None:
            states = list(self.state.values())
            step_rows(step, self.weight, states, *gradients, factor)
            return
        for rows, grads in gradients.sums():
            self._step_rows(rows, grads.mul_(factor), lr, t)

    def _step_rows(self, rows: Tensor, grads: Tensor, lr: float, t: int) -> None:
        """One step of some distinct rows."""
        if self._settings.clip_value is not None:
            grads.clamp_(-self._settings.clip_value, self._settings.clip_value)
        exact = self._kind.dtype == torch.float32
        old = gather_rows(self.weight, rows).float() if self._needs_rows or not exact else None
        state = {name: gather_rows(values, rows) for name, values in self.state.items()}
        change = self._rule(self._settings, old, state, grads, lr, t)
        for name, values in state.items():
            self.state[name].index_copy_(0, rows, values)
        if exact:
            add_rows(self.weight, rows, change)
        else:  # round once, after the sum
            assert old is not None
            self.weight.index_copy_(0, rows, old.add_(change).to(self._kind.dtype))

    def gradient_square(self, pushes: Sequence[SlabPush], divisor: int) -> float:
        """The squared norm of the gradient that :meth:`apply` would use."""
        if not pushes:
            return 0.0
        total = 0.0
        for _, grads in by_row([of_bags(push) for push in pushes])(0).sums():
            total += float(grads.div_(divisor).square().sum())
        return total

    def _before_change(self, rows: Tensor) -> None:
        """Rows are about to change: a checkpoint may have to know."""
        if self._snapshot is not None:
            self._snapshot.before_change(rows)
        if self._touched is not None:
            self._touched[rows] = True

    def hold(self, *, touched_only: bool, track: bool) -> None:
        """Hold on to the values of this moment, for :meth:`write`.

        Args:
            touched_only: whether only the rows matter that changed since the last time.
            track: whether to take note of the rows that change from now on.
        """
        rows = None
        if touched_only:
            assert self._touched is not None
            rows = self._touched.nonzero().squeeze(1)
        self._touched_rows = rows
        self._touched = torch.zeros(len(self.weight), dtype=torch.bool) if track else None
        self._snapshot = Snapshot({WEIGHT: self.weight, **self.state}, rows)

    def write(self, folder: Path, name: str) -> list[ShardEntry]:
        """Write the values held, while updates go on; says what is where."""
        assert self._snapshot is not None
        names = {what: f"{name}.{what}" for what in (WEIGHT, *self.state)}
        try:
            files = write_rows(folder, names, self._snapshot.chunks())
            if self._touched_rows is not None:
                rows = [{ROWS: self._touched_rows}]
                files |= write_rows(folder, {ROWS: f"{name}.{ROWS}"}, rows)
        finally:
            self._snapshot = self._touched_rows = None
        columns = self.weight.shape[1]
        return [
            ShardEntry(
                part.table, part.row_shard, part.num_row_shards, part.first_column, columns,
                part.num_rows, part.first_row, files,
            )
            for part in self._parts
        ]  # fmt: skip

    def load(self, source: SavedRows, tables: Mapping[str, str], *, state: bool) -> None:
        """Take the rows of some tables from a checkpoint.

        Args:
            source: the checkpoint.
            tables: for each table here, the one there that its rows come from.
            state: whether to take the optimizer's state too.
        """
        for part in self._parts:
            if part.table in tables:
                own = slice(part.first_row, part.first_row + part.num_rows)
                targets = {WEIGHT: self.weight[own]}
                if state:
                    targets |= {name: values[own] for name, values in self.state.items()}
                for what, rows in targets.items():
                    source.read(tables[part.table], what, part, rows)

    def read(self, what: str, rows: Tensor) -> Tensor:
        """Rows of the weight or of a state, as float32: (len(rows), its width)."""
        source = self.weight if what == WEIGHT else self.state[what]
        return gather_rows(source, rows).float()

    def set_rows(self, rows: Tensor, values: Tensor, *, reset_state: bool) -> None:
        """Write rows.

        Args:
            rows: (U,) int64, all different.
            values: (U, D).
            reset_state: whether their optimizer state is as at the beginning again.
        """
        self._before_change(rows)
        self.weight.index_copy_(0, rows, values.to(self._kind.dtype))
        if reset_state:
            for name, state in self.state.items():
                state.index_fill_(0, rows, self._settings.initial_state(name))


def _filled(shape: tuple[int, int], value: float) -> Tensor:
    # The system hands out zeros page by page, when first touched.
    memory = private_memory(shape, torch.float32)
    return memory.fill_(value) if value else memory


def _table_memory(
    shape: tuple[int, int], dtype: torch.dtype, *, share: bool
) -> tuple[Tensor, Segment | None]:
    """Memory for a table: shared where there is such, and where trainers may read it."""
    segment = new_segment(shape[0] * shape[1] * dtype.itemsize) if share else None
    if segment is None:
        return private_memory(shape, dtype), None
    return as_tensor(segment.bytes, shape, dtype), segment
