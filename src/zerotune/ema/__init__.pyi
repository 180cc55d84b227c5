# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.ema.decay import HalfLife as HalfLife
from zerotune.ema.decay import RampDecay as RampDecay
from zerotune.ema.decay import WarmupDecay as WarmupDecay
from zerotune.ema.model import EMAModel as EMAModel
from zerotune.ema.shadow import EMAShadow as EMAShadow
from zerotune.ema.shadow import EMAShadows as EMAShadows
from zerotune.ema.stores import DeviceStore as DeviceStore
from zerotune.ema.stores import FileStore as FileStore
