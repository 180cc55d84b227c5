"""Training: the wiring of all parts, and what a loop wants around it.

Loaded late, because it brings torch with it.
"""

from __future__ import annotations

from zerotune.backend.compilation import Compilation
from zerotune.backend.trained_parts import frozen
from zerotune.training.embedded import EmbeddedPlan, EngineSchedule
from zerotune.training.events import (
    Callback,
    MetricsFile,
    RunView,
    StepMetrics,
    read_metrics,
)
from zerotune.training.memory import expected_memory
from zerotune.training.nonfinite import (
    NonFinite,
    NonFinitePolicy,
    RaiseNonFinite,
    RollBackNonFinite,
    SkipNonFinite,
)
from zerotune.training.options import RunOptions
from zerotune.training.plots import plot_loss, plot_report
from zerotune.training.profile import Operator, Profile
from zerotune.training.progress import ProgressBar
from zerotune.training.report import Bound, Report
from zerotune.training.sampling import SampleOptions
from zerotune.training.save import SaveEvery, SaveEveryInBackground
from zerotune.training.setup import prepare
from zerotune.training.step import TrainStep
from zerotune.training.stop import StopOnSignals
from zerotune.training.tracking import Trackers
from zerotune.training.trainer import Trainer
from zerotune.training.validate import Validation, ValidationImages, ValidationLoss
from zerotune.training.watchdog import Watchdog

__all__ = [
    "prepare",
    "EmbeddedPlan",
    "EngineSchedule",
    "Trainer",
    "TrainStep",
    "Callback",
    "RunView",
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
