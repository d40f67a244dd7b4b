"""Multi-tower training for Keras on TensorFlow: as on one big device.

The door for Python users is `multi_gpu_model`; for the command line, `towers.train`.
"""

from towers.model import TowerModel, multi_gpu_model

__all__ = ["TowerModel", "multi_gpu_model"]
