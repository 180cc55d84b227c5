# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.checkpoint.export.adapters import export_adapters as export_adapters
from zerotune.checkpoint.export.model import export_model as export_model
from zerotune.checkpoint.export.pipeline import export_pipeline as export_pipeline
from zerotune.checkpoint.folders import latest_checkpoint as latest_checkpoint
from zerotune.checkpoint.holding import RootHold as RootHold
from zerotune.checkpoint.load import load_checkpoint as load_checkpoint
from zerotune.checkpoint.marks import check_replaceable as check_replaceable
from zerotune.checkpoint.save import BackgroundSaver as BackgroundSaver
from zerotune.checkpoint.save import save_checkpoint as save_checkpoint
