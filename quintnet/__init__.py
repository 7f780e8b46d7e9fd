"""The public face of quintnet_compiler: ``quintnet.compile(model, mesh)``."""

import quintnet_compiler as _compiler
from quintnet_compiler import *

__all__ = list(_compiler.__all__)
