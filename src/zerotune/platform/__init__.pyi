# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.platform.detect import Cores as Cores
from zerotune.platform.detect import MachineProbe as MachineProbe
from zerotune.platform.detect import PlatformProbe as PlatformProbe
from zerotune.platform.detect import TorchFacts as TorchFacts
from zerotune.platform.detect import detect_platform as detect_platform
from zerotune.platform.facts import GIB as GIB
from zerotune.platform.facts import Accelerator as Accelerator
from zerotune.platform.facts import DeepSpeedSupport as DeepSpeedSupport
from zerotune.platform.facts import Device as Device
from zerotune.platform.facts import HostMemory as HostMemory
from zerotune.platform.facts import Platform as Platform
