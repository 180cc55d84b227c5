# All that the package exports: for type checkers, and for ``zerotune._util.lazy`` at run time.

from zerotune.platform.detect import detect_platform as detect_platform
from zerotune.platform.facts import CUDA as CUDA
from zerotune.platform.facts import Platform as Platform
