"""Keeps the examples of a source, as pixels or as they are encoded, where they fit.

The first epoch fills the memory; files of pixels on disk are written before it.
"""

from towers.input_pipeline.cache.keep import cached
from towers.machine.limits import free_memory

__all__ = ["cached", "free_memory"]
