"""Training: the wiring of all parts, and what a loop wants around it.

Loaded late, because it brings torch with it.
"""

from __future__ import annotations

from zerotune.backend.compilation import Compilation
from zerotune.backend.freezing import frozen
from zerotune.training.bounds import Bound
from zerotune.training.callbacks import Callback
from zerotune.training.drawing import SampleOptions
from zerotune.training.embedded import EmbeddedPlan, EngineSchedule
from zerotune.training.memory import expected_memory
from zerotune.training.metrics import MetricsFile, StepMetrics, read_metrics
from zerotune.training.nonfinite import (
    NonFinite,
    NonFinitePolicy,
    RaiseNonFinite,
    RollBackNonFinite,
    SkipNonFinite,
)
from zerotune.training.plots import plot_loss, plot_report
from zerotune.training.profiling import Operator, Profile
from zerotune.training.progress import ProgressBar
from zerotune.training.report import Report
from zerotune.training.running import RunOptions
from zerotune.training.saving import SaveEvery, SaveEveryInBackground
from zerotune.training.setup import prepare
from zerotune.training.signals import StopOnSignals
from zerotune.training.step import TrainStep
from zerotune.training.tracking import Trackers
from zerotune.training.trainer import Trainer
from zerotune.training.validation import Validation, ValidationImages, ValidationLoss
from zerotune.training.watchdog import Watchdog

__all__ = [
    "prepare",
    "EmbeddedPlan",
    "EngineSchedule",
    "Trainer",
    "TrainStep",
    "Callback",
    "ProgressBar",
    "MetricsFile",
    "SaveEvery",
    "SaveEveryInBackground",
    "StopOnSignals",
    "Trackers",
    "Validation",
    "ValidationImages",
    "ValidationLoss",
    "SampleOptions",
    "frozen",
    "NonFinite",
    "NonFinitePolicy",
    "RaiseNonFinite",
    "SkipNonFinite",
    "RollBackNonFinite",
    "StepMetrics",
    "read_metrics",
    "RunOptions",
    "Compilation",
    "Profile",
    "Operator",
    "Watchdog",
    "Report",
    "Bound",
    "expected_memory",
    "plot_loss",
    "plot_report",
]
