"""Keras callbacks that watch, write and save a run."""

from towers.elastic.preemption import PreemptionNotice
from towers.elastic.resize import Resize
from towers.lifecycle.checkpoint import Checkpoint
from towers.monitoring.bottleneck.starvation import Starvation
from towers.monitoring.device_report import DeviceReport
from towers.monitoring.profile.callback import Profile
from towers.monitoring.stall.callback import Stall
from towers.monitoring.step_time import StepTime
from towers.monitoring.tensorboard.callback import TensorBoard
from towers.monitoring.throughput import Throughput

__all__ = [
    "Checkpoint",
    "DeviceReport",
    "PreemptionNotice",
    "Profile",
    "Resize",
    "Stall",
    "Starvation",
    "StepTime",
    "TensorBoard",
    "Throughput",
]
