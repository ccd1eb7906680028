"""The optimizer step inside the backward pass."""

from .fuse import fuse_backward
from .handle import FusedBackward

__all__ = ["FusedBackward", "fuse_backward"]
