"""Reads a source once and keeps it, as pixels or as it is encoded, where it fits.

Pixels are kept in memory or on the disk, encoded images in memory.
"""

from towers.input_pipeline.cache.keep import cached
from towers.machine.limits import free_memory

__all__ = ["cached", "free_memory"]
