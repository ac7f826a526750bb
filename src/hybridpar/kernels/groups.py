"""`Groups`: ids by the row that they mean.

Shapes: N ids, U distinct rows among them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Groups(NamedTuple):
    """Ids by row, a row's in the order in which they came.

    Attributes:
        rows: (U,) int64, all different, in no order that means anything.
        starts: (U,) int64, where in ``bags`` each row's ids begin.
        bags: (N,) int64, of each id the bag that it is in.
    """

    rows: Tensor
    starts: Tensor
    bags: Tensor

    def some(self, first: int, last: int) -> Groups:
        """The rows from one to another."""
        starts = self.starts[first:last]
        if not len(starts):
            return Groups(self.rows[first:last], starts, self.bags[:0])
        begin = int(starts[0])
        end = int(self.starts[last]) if last < len(self.starts) else len(self.bags)
        return Groups(self.rows[first:last], starts - begin, self.bags[begin:end])
