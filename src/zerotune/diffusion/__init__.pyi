# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.backend.trained_parts import TrainedParts as TrainedParts
from zerotune.diffusion.activations import ActivationOffload as ActivationOffload
from zerotune.diffusion.data import DataStream as DataStream
from zerotune.diffusion.data import ImageTensors as ImageTensors
from zerotune.diffusion.encoding import encode_dataset as encode_dataset
from zerotune.diffusion.grid import images_to_grid as images_to_grid
from zerotune.diffusion.held_out import validation_loss as validation_loss
from zerotune.diffusion.lora import LoRA as LoRA
from zerotune.diffusion.lora import add_lora as add_lora
from zerotune.diffusion.lora import load_adapters as load_adapters
from zerotune.diffusion.models.family import ClassConditional as ClassConditional
from zerotune.diffusion.models.family import Unconditional as Unconditional
from zerotune.diffusion.models.pipeline_family import PipelineFamily as PipelineFamily
from zerotune.diffusion.noise import InputPerturbation as InputPerturbation
from zerotune.diffusion.noise import OffsetNoise as OffsetNoise
from zerotune.diffusion.objective import DenoisingObjective as DenoisingObjective
from zerotune.diffusion.objective import FlowMatchingObjective as FlowMatchingObjective
from zerotune.diffusion.pretrained import load_pretrained as load_pretrained
from zerotune.diffusion.sampling import sample as sample
