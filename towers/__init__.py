"""Multi-tower training for Keras on TensorFlow: as on one big device.

The door for Python users is `multi_gpu_model`, with `configure` before it to choose the
devices; for the command line it is `towers.train`.
"""

from towers.devices import configure
from towers.model import TowerModel, multi_gpu_model

__all__ = ["TowerModel", "configure", "multi_gpu_model"]
