"""hybridpar: embedding tables on parameter servers, the dense half under DDP."""

import logging as _logging
import warnings

with warnings.catch_warnings():  # torch without NumPy says so at its import, and works
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    import torch as _torch  # noqa: F401

from hybridpar import callbacks, metrics, optim
from hybridpar.callbacks.records import Evaluation
from hybridpar.errors import (
    CallbackError,
    CheckpointError,
    HybridParError,
    InputError,
    PeerLostError,
    RemoteError,
    SpecError,
    TrainFunctionError,
    WaitTimeoutError,
    WorkerError,
)
from hybridpar.launch.launcher import RoleLauncher, launch
from hybridpar.launch.roles import Roles
from hybridpar.planning.planned import plan
from hybridpar.planning.report import PlanReport, ServerPlan, TablePlan, TrainerPlan
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.checkpointing.checkpoint import Checkpoint
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.evaluation.early_stopping import EarlyStopping
from hybridpar.trainer.handing_over.exported import ExportedModel
from hybridpar.trainer.loop import TrainerLoop
from hybridpar.trainer.model import HybridModel
from hybridpar.trainer.progress import FitResult
from hybridpar.trainer.sparse_optimizer import SparseOptimizer

__version__ = "0.1.0"

_logging.getLogger("hybridpar").addHandler(_logging.NullHandler())  # quiet unless asked

__all__ = [
    "CallbackError",
    "Checkpoint",
    "CheckpointError",
    "EarlyStopping",
    "Evaluation",
    "ExportedModel",
    "FitResult",
    "HybridModel",
    "HybridParError",
    "InputError",
    "PeerLostError",
    "PlanReport",
    "RemoteEmbeddingSpec",
    "RemoteError",
    "RoleLauncher",
    "Roles",
    "ServerPlan",
    "SparseOptimizer",
    "SpecError",
    "TablePlan",
    "TrainFunctionError",
    "TrainerContext",
    "TrainerLoop",
    "TrainerPlan",
    "WaitTimeoutError",
    "WorkerError",
    "callbacks",
    "launch",
    "metrics",
    "optim",
    "plan",
]
