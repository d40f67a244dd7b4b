"""Features beside the core, which a run imports only if it uses them.

No import statement of the core names a feature. So readers of a plain step need not
read how hosts meet, and changes to that code do not affect the core.
"""

import importlib
from typing import Any

FEATURES = {
    "builders.asynchronous.strategy": 'variable_update="asynchronous"',
    "cluster.environment": "what a launcher says of several hosts",
    "cluster.process_group": "several hosts: how they meet",
    "collectives.first_host": "several hosts: variables that follow the first one's",
    "collectives.spread.hosts_parts": "several hosts: the variables that they divide",
    "collectives.spread.parameters": "several hosts: optimizer state that they divide",
    "collectives.spread.tables": "several hosts: tables that they divide",
    "devices.free": "--gpu_indices=free",
    "doctor.gpus.at_start": "GPUs of NVIDIA's: why TensorFlow does not use them",
    "doctor.gpus.built": "the versions of CUDA and cuDNN, as a run starts",
    "elastic.notice": "--preemption_notice, as flags are checked",
    "elastic.balance": "--split_ratios=auto",
    "elastic.preemption": "--preemption_notice, as a run trains",
    "elastic.shares": "--share_gpus",
    "lifecycle.remote_run": "a model_dir at an address",
    "loop.agreement": "several hosts: what they agree on with each batch",
    "loop.host_times": "several hosts: which of them holds up the others",
    "model.remembered": "choice_file=, and what towers train measures",
    "monitoring.bottleneck.hosts": "several hosts: a sentence on their times",
    "monitoring.bottleneck.stages": "several stages: a sentence on their times",
    "monitoring.stall.hosts": "several hosts: which of them is waited for",
    "monitoring.profile.callback": "--profile_steps",
    "numerics.failed_stage": "a stage that has failed",
    "numerics.last_batch": "several stages: batches that are kept, in case one fails",
    "numerics.not_finite": "check_numerics, once a step is not finite",
    "program.quiet_xla": "a second start with XLA",
    "stages.measure": "stages that are divided by the time of their layers",
    "stages.phases": "recompute, without stages",
    "stages.staged": "several stages",
    "stages.table": "several stages: what is said of them",
    "tower.kept": "--cache=devices",
    "train.outputs.mistakes": "the mistakes of a model that chooses a class",
    "train.parts.auto_count": "--num_gpus=auto",
    "train.parts.keeping": "--cache=devices, once examples are at hand",
    "train.parts.fine_tune": "--init_weights, --freeze",
}
"""Modules of towers, each with the option or the code that uses it."""


def feature(name: str) -> Any:
    """Imports a feature, and returns its module.

    Args:
        name: One of `FEATURES`.

    Returns:
        The module.
    """
    if name not in FEATURES:
        raise KeyError(f"{name} is none of FEATURES in towers/program/features.py.")
    return importlib.import_module(f"towers.{name}")
