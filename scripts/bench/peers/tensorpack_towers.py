"""A contender: tensorpack, on a constant batch.

Where it names GPUs, logical CPUs stand in if there are none: it is changed while it is
imported, and its checkout stays as it is.
"""

import importlib.machinery
import os
import sys

from .. import works
from ..worker import Clock, Job, tensorflow_memory_mb, use_checkout

# The modules that place towers.
_PLACING = "tensorpack.graph_builder.training", "tensorpack.train.tower"


def run(job: Job, clock: Clock) -> None:
    """Trains until the clock stops it."""
    use_checkout(job, "tensorpack_dir", "tensorpack/__init__.py")
    # TensorFlow 1's layers are those of Keras 2.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow.compat.v1 as tf
    import tf_keras  # noqa: F401  (to say so if it is missing)

    tf.disable_v2_behavior()
    gpus = bool(tf.config.list_physical_devices("GPU"))
    if not gpus:
        sys.meta_path.insert(0, _Finder)
    import tensorpack
    from tensorpack.tfutils.common import get_default_sess_config
    from tensorpack.tfutils.sesscreate import NewSessionCreator
    from tensorpack.tfutils.sessinit import JustCurrentSession

    class Turns(tensorpack.Callback):
        def _trigger_step(self):
            clock.call_ended()

    trainer = {
        "parameter_server": tensorpack.SyncMultiGPUTrainerParameterServer,
        "replicated": tensorpack.SyncMultiGPUTrainerReplicated,
        "asynchronous": tensorpack.AsyncMultiGPUTrainer,
    }[job.parsed.way](job.towers)
    config = get_default_sess_config()
    if not gpus:
        config.device_count["CPU"] = job.towers
        # Its default, one thread for an operation, is meant for the host of GPUs.
        config.intra_op_parallelism_threads = 0
    arrays = works.batch(job.work, 1)
    signature = [
        tf.TensorSpec(array.shape, array.dtype, name)
        for array, name in zip(arrays, ("input", "label"), strict=True)
    ]
    network = {"mlp": _mlp, "resnet20": _resnet20}[job.work]

    def cost(x, y):
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(logits=network(x), labels=y)
        )

    clock.memory_mb = tensorflow_memory_mb
    clock.start()
    trainer.setup_graph(
        signature,
        tensorpack.TensorInput(lambda: [tf.constant(array) for array in arrays]),
        cost,
        lambda: tf.train.MomentumOptimizer(works.LEARNING_RATE, works.MOMENTUM),
    )
    trainer.train(
        # The first updates what BatchNorm keeps.
        callbacks=[tensorpack.RunUpdateOps(), Turns()],
        monitors=[],
        session_creator=NewSessionCreator(config=config),
        session_init=JustCurrentSession(),
        steps_per_epoch=sys.maxsize,
    )


class _Finder:
    """Finds the modules that place towers, for `_OnCpus` to load."""

    @staticmethod
    def find_spec(name, path, target=None):
        if name not in _PLACING:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        spec.loader = _OnCpus(name, spec.origin)
        return spec


class _OnCpus(importlib.machinery.SourceFileLoader):
    """Loads a module with CPUs where it names GPUs."""

    def get_code(self, fullname):
        source = self.get_data(self.path).replace(b"'/gpu:{", b"'/cpu:{")
        return self.source_to_code(source, self.path)


def _mlp(x):
    import tensorflow.compat.v1 as tf
    from tensorpack import FullyConnected

    for number in range(3):
        x = FullyConnected(f"hidden{number}", x, 512, activation=tf.nn.relu)
    return FullyConnected("logits", x, works.WORKS["mlp"].classes)


def _resnet20(x):
    import tensorflow.compat.v1 as tf
    from tensorpack import BatchNorm, Conv2D, FullyConnected, GlobalAvgPooling

    def conv_bn(name, x, filters, stride=1):
        x = Conv2D(name, x, filters, 3, strides=stride, use_bias=False)
        return BatchNorm(f"{name}_bn", x, momentum=0.9, epsilon=1e-3)

    x = tf.nn.relu(conv_bn("stem", x, 16))
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            stride = 2 if stage and not block else 1
            name = f"stage{stage}_block{block}"
            y = tf.nn.relu(conv_bn(f"{name}_first", x, filters, stride))
            y = conv_bn(f"{name}_second", y, filters)
            if stride > 1:
                missing = [filters // 4, filters // 4]
                x = x[:, ::stride, ::stride]
                x = tf.pad(x, [[0, 0], [0, 0], [0, 0], missing])
            x = tf.nn.relu(x + y)
    return FullyConnected(
        "logits", GlobalAvgPooling("pool", x), works.WORKS["resnet20"].classes
    )
