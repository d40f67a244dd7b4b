"""A contender: tf_cnn_benchmarks, unmodified, with this benchmark's models registered.

It keeps its own loop: the function that runs a step is wrapped, and so waits for its
turn.
"""

import os
import sys

from .. import works
from ..worker import Clock, Job, tensorflow_memory_mb


def run(job: Job, clock: Clock) -> None:
    """Trains until the clock stops it."""
    folder = job.checkout or ""
    if not os.path.exists(os.path.join(folder, "benchmark_cnn.py")):
        raise ValueError(
            f"--tf_cnn_dir must be a folder with benchmark_cnn.py, but is {folder!r}."
        )
    sys.path.insert(0, folder)
    # The checkout stays as it is.
    sys.dont_write_bytecode = True
    # TensorFlow 1's layers are those of Keras 2.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow.compat.v1 as tf
    import tf_keras  # noqa: F401  (to say so if it is missing)

    tf.disable_v2_behavior()
    import benchmark_cnn
    import flags
    import mlperf
    from absl import flags as absl_flags

    from models import model_config

    flags.define_flags()
    gpus = tf.config.list_physical_devices("GPU")
    absl_flags.FLAGS(["tf_cnn_benchmarks", *_flags(job, bool(gpus))])
    model_config.register_model(_NAME, "cifar10", _models()[job.work])
    run_step = benchmark_cnn.benchmark_one_step

    def run_step_in_turn(*args, **kwargs):
        result = run_step(*args, **kwargs)
        clock.call_ended()
        return result

    benchmark_cnn.benchmark_one_step = run_step_in_turn
    clock.memory_mb = tensorflow_memory_mb
    params = benchmark_cnn.make_params_from_flags()
    with mlperf.mlperf_logger(False, params.model):
        params = benchmark_cnn.setup(params)
        clock.start()
        benchmark_cnn.BenchmarkCNN(params).run()


_NAME = "benchmarked"


def _flags(job: Job, gpus: bool) -> list[str]:
    """Returns the flags of tf_cnn_benchmarks."""
    way = job.parsed.way
    named = {
        "model": _NAME,
        # It says how many classes there are: 10, and one more.
        "data_name": "cifar10",
        "num_gpus": job.towers,
        "batch_size": works.WORKS[job.work].examples,
        "variable_update": way,
        "local_parameter_device": "cpu" if way == "parameter_server" else "gpu",
        "optimizer": "momentum",
        "momentum": works.MOMENTUM,
        "init_learning_rate": works.LEARNING_RATE,
        "weight_decay": 0,
        "use_fp16": works.WORKS[job.work].policy == "mixed_float16",
        # The clock counts steps.
        "num_batches": 10**9,
        "num_warmup_batches": 0,
        "display_every": 10**9,
    }
    if gpus:
        named |= {"device": "gpu", "data_format": "NCHW", "allow_growth": True}
    else:
        named |= {"device": "cpu", "data_format": "NHWC"}
        named["local_parameter_device"] = "cpu"
    if way == "replicated" and job.towers > 1:
        named["all_reduce_spec"] = "nccl" if gpus else "pscpu"
    return [f"--{name}={value}" for name, value in named.items()]


def _models() -> dict:
    """Defines the models; they need the program's own classes.

    Returns:
        A function of `params` for each work, which returns the model.
    """
    import tensorflow.compat.v1 as tf

    # The checkout's own package, not ours.
    from models import model as model_lib
    from models import resnet_model

    class Mlp(model_lib.CNNModel):
        def __init__(self, params=None):
            # Pictures of one channel, with as many pixels as the work has inputs.
            super().__init__(_NAME, 28, 32, works.LEARNING_RATE, params=params)
            self.depth = 1

        def add_inference(self, cnn):
            cnn.reshape([-1, *works.WORKS["mlp"].shape])
            for _ in range(3):
                cnn.affine(512)

    class ResNet20(model_lib.CNNModel):
        def __init__(self, params=None):
            super().__init__(_NAME, 32, 64, works.LEARNING_RATE, params=params)

        def add_inference(self, cnn):
            cnn.use_batch_norm = True
            cnn.batch_norm_config = {"decay": 0.9, "epsilon": 1e-3, "scale": True}
            cnn.conv(16, 3, 3)
            for stage, filters in enumerate((16, 32, 64)):
                for block in range(3):
                    stride = 2 if stage and not block else 1
                    shortcut = _shortcut(cnn, filters, stride)
                    cnn.conv(filters, 3, 3, stride, stride)
                    y = cnn.conv(filters, 3, 3, activation=None)
                    cnn.top_layer = tf.nn.relu(shortcut + y)
            cnn.spatial_mean()

    def resnet50(params):
        model = resnet_model.create_resnet50_model(params)
        model.image_size = works.WORKS["resnet50"].shape[0]
        return model

    return {
        "mlp": Mlp,
        "resnet20": ResNet20,
        "resnet50": resnet50,
        # Its own: with 11 classes, which costs next to nothing less than 1000.
        "resnet50_224": resnet_model.create_resnet50_model,
    }


def _shortcut(cnn, filters: int, stride: int):
    """Every second pixel, and channels of zeros."""
    import tensorflow.compat.v1 as tf

    if stride == 1:
        return cnn.top_layer
    half = (filters - cnn.top_size) // 2
    if cnn.data_format == "NCHW":
        return tf.pad(
            cnn.top_layer[:, :, ::stride, ::stride],
            [[0, 0], [half, half], [0, 0], [0, 0]],
        )
    return tf.pad(
        cnn.top_layer[:, ::stride, ::stride], [[0, 0], [0, 0], [0, 0], [half, half]]
    )
