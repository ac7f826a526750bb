"""`TensorBoard`: steps and evaluations as scalars for TensorBoard."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from typing_extensions import override

from hybridpar.callbacks.logger import Interval, Logger, scalars_of
from hybridpar.callbacks.records import End, Evaluation, Failure, Run, Step
from hybridpar.errors import SpecError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Logger):
    """Writes scalars that ``tensorboard --logdir`` shows: ``loss``, rates, metrics, results.

    Args:
        directory: where the event files go.
        every: as for every logger: optimizer steps between two entries.

    Raises:
        SpecError: if TensorBoard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], *, every: int = 10) -> None:
        super().__init__(every)
        self._directory = os.fspath(directory)
        self._writer: SummaryWriter | None = None
        if importlib.util.find_spec("tensorboard") is None:
            raise SpecError(
                "TensorBoard is not installed. Install it: pip install 'hybridpar[tensorboard]'."
            )

    @override
    def on_start(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._close()
        # What a resumed run had written beyond its first step is left out of the curves.
        self._writer = SummaryWriter(self._directory, purge_step=run.step + 1 if run.step else None)
        for title, texts in (("settings", run.settings), ("versions", run.versions)):
            lines = [f"    {name}: {value}" for name, value in texts.items()]
            self._writer.add_text(title, "\n".join(lines), run.step)

    @override
    def write(self, interval: Interval, step: Step) -> None:
        if self._writer is not None:
            for name, value in scalars_of(interval, step).items():
                self._writer.add_scalar(name, value, step.step, step.time)

    @override
    def on_evaluation(self, evaluation: Evaluation) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:  # between two fits
            self._writer = SummaryWriter(self._directory)
        for name, value in evaluation.results.items():
            tag = f"evaluation/{name}"
            self._writer.add_scalar(tag, value, evaluation.step, evaluation.time)
        self._writer.flush()

    @override
    def close(self, record: End | Failure) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
