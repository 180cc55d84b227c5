# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.diffusion.data.batches import ImageTensors as ImageTensors
from zerotune.diffusion.data.buckets import AspectBuckets as AspectBuckets
from zerotune.diffusion.data.clip_buckets import ClipBuckets as ClipBuckets
from zerotune.diffusion.data.clips import ClipFolder as ClipFolder
from zerotune.diffusion.data.clips import PreparedClips as PreparedClips
from zerotune.diffusion.data.folder import ImageFolder as ImageFolder
from zerotune.diffusion.data.folder import MetadataFile as MetadataFile
from zerotune.diffusion.data.folder import TextBeside as TextBeside
from zerotune.diffusion.data.hugging_face import DatasetImages as DatasetImages
from zerotune.diffusion.data.hugging_face import HuggingFaceImages as HuggingFaceImages
from zerotune.diffusion.data.preparation import Augmentation as Augmentation
from zerotune.diffusion.data.preparation import Preparation as Preparation
from zerotune.diffusion.data.preparation import PreparedImages as PreparedImages
from zerotune.diffusion.data.preparation import TagShuffle as TagShuffle
from zerotune.diffusion.data.streams import BucketStream as BucketStream
from zerotune.diffusion.data.streams import DataStream as DataStream
