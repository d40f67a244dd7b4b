"""TensorFlow's flags and files of XLA's results on disk."""

import re

import tensorflow as tf

__all__ = ["FLAGS", "RESULT", "flags", "keeps_results", "may_be_of_results"]

FLAGS = "TF_XLA_FLAGS"
"""The variable of flags, which TensorFlow reads when it first lists its devices."""

RESULT = re.compile(r"xla_compile_cache__\d+__\d+__\w+\.pb")
"""The name of a result: a signature, the function's content and the kind of device."""

_FOLDER = "tf_xla_persistent_cache_directory"


def flags(folder: str, only_cpus: bool) -> str:
    """Returns flags that let TensorFlow keep XLA's results in a folder."""
    kinds = "--tf_xla_persistent_cache_device_types=CPU,XLA_CPU_JIT"
    return f'--{_FOLDER}="{folder}"' + (f" {kinds}" if only_cpus else "")


def keeps_results(flags: str) -> bool:
    """Checks whether flags of the user's say where XLA's results are kept."""
    return _FOLDER in flags


def may_be_of_results(error: tf.errors.OpError) -> bool:
    """Checks whether an error may be of a result that TensorFlow could not load."""
    if isinstance(error, tf.errors.InvalidArgumentError):
        return bool(re.search("[Ss]erialized", error.message))
    of_model = tf.errors.UnimplementedError, tf.errors.ResourceExhaustedError
    return not isinstance(error, (*of_model, tf.errors.AbortedError))
