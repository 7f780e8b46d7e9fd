"""Values and state of devices that wait in host memory, or in files. See README.md."""

from .feature import OFFLOAD

__all__ = ["OFFLOAD"]
