# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.checkpoint.contents import ShadowLike as ShadowLike
from zerotune.checkpoint.conversion import convert as convert
from zerotune.checkpoint.export.adapters import ExportedAdapters as ExportedAdapters
from zerotune.checkpoint.export.adapters import export_adapters as export_adapters
from zerotune.checkpoint.export.merge import export_merged as export_merged
from zerotune.checkpoint.export.merge import merge_adapters as merge_adapters
from zerotune.checkpoint.export.model import export_checkpoint as export_checkpoint
from zerotune.checkpoint.export.model import export_model as export_model
from zerotune.checkpoint.export.pipeline import export_pipeline as export_pipeline
from zerotune.checkpoint.folders import RootHold as RootHold
from zerotune.checkpoint.folders import latest_checkpoint as latest_checkpoint
from zerotune.checkpoint.folders import prune as prune
from zerotune.checkpoint.folders import step_folder as step_folder
from zerotune.checkpoint.folders import verify_checkpoint as verify_checkpoint
from zerotune.checkpoint.load import CheckpointContents as CheckpointContents
from zerotune.checkpoint.load import load_checkpoint as load_checkpoint
from zerotune.checkpoint.load import restore as restore
from zerotune.checkpoint.manifest import Manifest as Manifest
from zerotune.checkpoint.publishing import Card as Card
from zerotune.checkpoint.publishing import Published as Published
from zerotune.checkpoint.publishing import publish as publish
from zerotune.checkpoint.save import BackgroundSaver as BackgroundSaver
from zerotune.checkpoint.save import PendingCheckpoint as PendingCheckpoint
from zerotune.checkpoint.save import save_checkpoint as save_checkpoint
