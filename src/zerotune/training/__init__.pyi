# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.backend.trained_parts import frozen as frozen
from zerotune.training.embedded import EmbeddedPlan as EmbeddedPlan
from zerotune.training.events import Callback as Callback
from zerotune.training.events import MetricsFile as MetricsFile
from zerotune.training.progress import ProgressBar as ProgressBar
from zerotune.training.save import SaveEvery as SaveEvery
from zerotune.training.save import SaveEveryInBackground as SaveEveryInBackground
from zerotune.training.setup import prepare as prepare
from zerotune.training.step import RollBackNonFinite as RollBackNonFinite
from zerotune.training.step import SkipNonFinite as SkipNonFinite
from zerotune.training.stop import StopOnSignals as StopOnSignals
from zerotune.training.tracking import Trackers as Trackers
from zerotune.training.trainer import Trainer as Trainer
from zerotune.training.validate import ValidationImages as ValidationImages
from zerotune.training.validate import ValidationLoss as ValidationLoss
from zerotune.training.watchdog import Watchdog as Watchdog
