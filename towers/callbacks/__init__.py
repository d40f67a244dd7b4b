"""Keras callbacks that watch, write and save a run."""

from towers.callbacks.checkpoint import Checkpoint
from towers.callbacks.devices import DeviceReport
from towers.callbacks.profile import Profile
from towers.callbacks.stall import Stall
from towers.callbacks.starvation import Starvation
from towers.callbacks.step_time import StepTime
from towers.callbacks.tensorboard import TensorBoard
from towers.callbacks.throughput import Throughput

__all__ = [
    "Checkpoint",
    "DeviceReport",
    "Profile",
    "Stall",
    "Starvation",
    "StepTime",
    "TensorBoard",
    "Throughput",
]
