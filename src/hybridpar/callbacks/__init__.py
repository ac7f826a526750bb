"""Told what happens while a loop trains: callbacks, and those that hybridpar brings along.

A callback is an object of a class derived from :class:`Callback`, which overrides what it wants to
hear of. It is given to ``TrainerLoop(callbacks=[…])``.
"""

from hybridpar.callbacks.callback import Callback
from hybridpar.callbacks.csv_file import CSV
from hybridpar.callbacks.jsonl import JSONL
from hybridpar.callbacks.monitors import LearningRateMonitor, StalenessMonitor
from hybridpar.callbacks.progress_bar import ProgressBar
from hybridpar.callbacks.prometheus import Prometheus
from hybridpar.callbacks.records import (
    End,
    Evaluation,
    Failure,
    Profile,
    Run,
    Saved,
    Step,
)
from hybridpar.callbacks.report_page import Report
from hybridpar.callbacks.servers import PlannedServer, PlannedShard, PlannedTable, ServerTraffic
from hybridpar.callbacks.tensorboard import TensorBoard

__all__ = [
    "CSV",
    "JSONL",
    "Callback",
    "End",
    "Evaluation",
    "Failure",
    "LearningRateMonitor",
    "PlannedServer",
    "PlannedShard",
    "PlannedTable",
    "Profile",
    "ProgressBar",
    "Prometheus",
    "Report",
    "Run",
    "Saved",
    "ServerTraffic",
    "StalenessMonitor",
    "Step",
    "TensorBoard",
]
