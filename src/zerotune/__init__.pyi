# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.checkpoint import export_adapters as export_adapters
from zerotune.checkpoint import export_model as export_model
from zerotune.checkpoint import export_pipeline as export_pipeline
from zerotune.checkpoint import latest_checkpoint as latest_checkpoint
from zerotune.checkpoint import load_checkpoint as load_checkpoint
from zerotune.checkpoint import save_checkpoint as save_checkpoint
from zerotune.diffusion import ClassConditional as ClassConditional
from zerotune.diffusion import DataStream as DataStream
from zerotune.diffusion import DenoisingObjective as DenoisingObjective
from zerotune.diffusion import FlowMatchingObjective as FlowMatchingObjective
from zerotune.diffusion import ImageTensors as ImageTensors
from zerotune.diffusion import LoRA as LoRA
from zerotune.diffusion import Unconditional as Unconditional
from zerotune.diffusion import add_lora as add_lora
from zerotune.diffusion import encode_dataset as encode_dataset
from zerotune.diffusion import images_to_grid as images_to_grid
from zerotune.diffusion import load_pretrained as load_pretrained
from zerotune.diffusion import sample as sample
from zerotune.diffusion.data import AspectBuckets as AspectBuckets
from zerotune.diffusion.data import ImageFolder as ImageFolder
from zerotune.diffusion.data import PreparedImages as PreparedImages
from zerotune.diffusion.model_facts import model_facts as model_facts
from zerotune.ema import EMAShadow as EMAShadow
from zerotune.errors import ZeroTuneError as ZeroTuneError
from zerotune.offload import OffloadManager as OffloadManager
from zerotune.offload import cleanup_stale_swap as cleanup_stale_swap
from zerotune.optim import OptimizerResolver as OptimizerResolver
from zerotune.plan import DeepSpeedPlan as DeepSpeedPlan
from zerotune.plan import ModelFacts as ModelFacts
from zerotune.plan import RunFacts as RunFacts
from zerotune.platform import Platform as Platform
from zerotune.platform import detect_platform as detect_platform
from zerotune.training import Callback as Callback
from zerotune.training import EmbeddedPlan as EmbeddedPlan
from zerotune.training import MetricsFile as MetricsFile
from zerotune.training import ProgressBar as ProgressBar
from zerotune.training import SaveEvery as SaveEvery
from zerotune.training import Trackers as Trackers
from zerotune.training import Trainer as Trainer
from zerotune.training import ValidationImages as ValidationImages
from zerotune.training import ValidationLoss as ValidationLoss
from zerotune.training import prepare as prepare

__version__: str
