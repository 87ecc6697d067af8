"""The prefix tree under its short name; see :mod:`hicache_controller.tree`."""

from .tree import *  # noqa: F403
from .tree import __all__ as __all__
