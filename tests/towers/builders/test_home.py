"""Where variables live if towers are on GPUs, which logical CPUs stand in for."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from tests import as_on_gpu
from tests.towers.train.runs import setup
from tests.valued import valued
from towers import ParameterServer, multi_gpu_model
from towers.layers import variables
from towers.train.parts import model as model_parts
from towers.train.parts.devices import configure_devices
from towers.train.settings import Settings

pytestmark = pytest.mark.quick_one_in(2)

GPUS = "/device:CPU:1", "/device:CPU:2"


@pytest.fixture
def gpus():
    """Logical CPUs that are taken for GPUs."""
    with as_on_gpu.made_up_gpus(*GPUS):
        yield GPUS


class Counts(keras.layers.Layer):
    """Has a variable of a type that GPUs do not have, and a seed made late."""

    def build(self, shape):
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        self.count.assign_add(1)
        return keras.random.dropout(x, 0.5, seed=self.seed) if training else x


class Subclassed(keras.Model):
    """Is built by its first batch."""

    def __init__(self):
        super().__init__()
        self.hidden = [keras.layers.Dense(4), keras.layers.Dropout(0.5, seed=2)]
        self.counts, self.last = Counts(), keras.layers.Dense(1)

    def call(self, x):
        for layer in (*self.hidden, self.counts, self.last):
            x = layer(x)
        return x


def _batches(rows=14, size=8):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "steps"),
    [
        ("parameter_server", 1),
        ("parameter_server", 2),
        ("replicated", 1),
        ("replicated", 2),
    ],
)
def test_what_gpus_cannot_hold_stays_on_the_host(gpus, builder, steps):
    model = Subclassed()
    parallel = multi_gpu_model(
        model,
        gpus,
        **valued(builder, device=gpus[0] if builder == "parameter_server" else None),
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    parallel.compile(optimizer, "mse", steps_per_execution=steps)
    parallel.fit(_batches(), verbose=0)
    places = {v.path: v.value.device[-len(gpus[0]) :] for v in variables.of(model)}
    hosted = {path for path, place in places.items() if place == "/device:CPU:0"}
    assert {path.rpartition("/")[2] for path in hosted} == {
        "seed_generator_state",
        "variable",  # the counter
    }
    assert {places[path] for path in places.keys() - hosted} == {gpus[0]}
    # They have arrived.
    values = [variable.value for variable in variables.of(model)]
    parallel.fit(_batches(), verbose=0)
    assert all(
        variable.value is value
        for variable, value in zip(variables.of(model), values, strict=True)
    )
    assert int(model.counts.count) == 4


def test_types_that_gpus_do_not_have():
    registered = kernels.get_registered_kernels_for_op("VarHandleOp").kernel
    on_gpus = {
        tf.as_dtype(dtype)
        for kernel in registered
        if kernel.device_type in ("GPU", "DEFAULT")
        for constraint in kernel.constraint
        for dtype in constraint.allowed_values.list.type
    }
    integers = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    floats = ["float16", "bfloat16", "float32", "float64"]
    for name in [*integers, *floats, "float8_e4m3fn", "float8_e5m2", "bool", "string"]:
        dtype = tf.as_dtype(name)
        assert (dtype in on_gpus) != (dtype in variables.NOT_ON_GPUS), name


@pytest.mark.slow
def test_the_usual_batch_is_the_first(gpus):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    parallel = multi_gpu_model(model, gpus)
    parallel.compile("sgd", "mse")
    assert parallel.builder.context.usual_rows is None
    history = parallel.fit(_batches(), epochs=2, verbose=0)
    assert parallel.builder.context.usual_rows == 8
    assert len(history.history["loss"]) == 2


# Figure 5 of issue 18: what is the default on made-up GPUs.


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that has TensorFlow find GPUs, which nothing can run on."""

    def find(count):
        visible = gpus = [
            tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU")
            for i in range(count)
        ]
        found = tf.config.list_physical_devices("CPU")

        def show(devices, kind):
            nonlocal visible
            visible = devices

        def logical(kind=None):
            made = [
                tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU")
                for i in range(len(visible))
            ]
            cpus = cpus_of("CPU") if kind != "GPU" else []
            return [*cpus, *(made if kind != "CPU" else [])]

        for module, name, stands_in in (
            (tf.config, "get_visible_devices", lambda kind: visible),
            (tf.config, "set_visible_devices", show),
            (tf.config, "list_logical_devices", logical),
            (
                tf.config,
                "get_logical_device_configuration",
                lambda device: None if device in gpus else configuration(device),
            ),
            (tf.config.experimental, "set_memory_growth", lambda gpu, grows: None),
            (
                tf.config,
                "list_physical_devices",
                lambda kind=None: [
                    *(found if kind != "GPU" else []),
                    *(gpus if kind != "CPU" else []),
                ],
            ),
        ):
            monkeypatch.setattr(module, name, stands_in)
        # Nothing can be put there.
        monkeypatch.setattr(variables, "move", lambda model, home: None)

    configuration = tf.config.get_logical_device_configuration
    cpus_of = tf.config.list_logical_devices
    return find


def _unbuilt():
    # With variables, it would be where they are.
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(3)])


def _default(parallel):
    """What a builder has been told, and what "auto" may choose instead."""
    used = parallel.builder
    alg, merge = "-", used.plan.merge[8:]
    if used.name == "replicated":
        alg, merge = used.pieces.store.algorithm, "-"
    others = [str(way) for way in parallel._self_program.ways()]
    what = used.name, alg, used.plan.home[8:], merge, used.context.prefetch, used.xla
    return (*what, others)


_OF_ONE = ["parameter_server", "parameter_server with XLA"]
_OF_CPUS = ["parameter_server", "replicated (cpu)", "replicated (ring)"]
_OF_CPUS += [f"{name} with XLA" for name in _OF_CPUS]
_OF_MANY = [
    *("replicated (nccl)", "replicated (nccl) with XLA", "parameter_server"),
    *("replicated (device)", "replicated (ring)", "parameter_server with XLA"),
    *("replicated (device) with XLA", "replicated (ring) with XLA"),
]
SERVER, COPIES = "parameter_server", "replicated"


@pytest.mark.parametrize(
    ("gpus", "flags", "expected"),
    [
        # GPUs, and then: builder, how it adds, home, where it merges, prefetch, XLA,
        # and candidates.
        (0, {}, (SERVER, "-", "CPU:0", "CPU:0", 0, False, _OF_CPUS)),
        (1, {}, (SERVER, "-", "GPU:0", "GPU:0", 2, False, _OF_ONE)),
        (2, {}, (COPIES, "nccl", "GPU:0", "-", 2, False, _OF_MANY)),
        (8, {}, (COPIES, "nccl", "GPU:0", "-", 2, False, _OF_MANY)),
        (8, {"gpu_indices": ["5", "2"]}, (COPIES, "nccl", "GPU:1", "-", 2, False)),
        (8, {"num_gpus": 1}, (SERVER, "-", "GPU:0", "GPU:0", 2, False, _OF_ONE)),
        # The way of averaging on the CPU.
        (
            8,
            {"local_parameter_device": "cpu"},
            (SERVER, "-", "CPU:0", "CPU:0", 2, False, _OF_ONE),
        ),
        (8, {"local_parameter_device": "gpu"}, (COPIES, "nccl", "GPU:0", "-", 2)),
        (
            8,
            {"variable_update": SERVER},
            (SERVER, "-", "GPU:0", "GPU:0", 2, False, _OF_ONE),
        ),
        (8, {"enable_xla": "true"}, (COPIES, "nccl", "GPU:0", "-", 2, True)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else str(value),
)
def test_defaults_of_the_flags(machine, monkeypatch, gpus, flags, expected):
    settings = Settings(**flags)

    def compiled(setup, parallel, *_):
        asked = {"auto": "auto", "true": True}[setup.settings.enable_xla]
        with tf.device("/device:CPU:0"):
            parallel.compile("sgd", "mse", jit_compile=asked)

    monkeypatch.setattr(model_parts, "compile_model", compiled)
    machine(gpus)
    policy = keras.config.dtype_policy()
    placed = configure_devices(settings)
    about = setup(settings, (2, 2, 1))
    parallel = model_parts.build_towers(about, _unbuilt(), placed, 64)
    found = _default(parallel)
    keras.config.set_dtype_policy(policy)
    assert found[: len(expected)] == expected


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (1, {}, (SERVER, "-", "GPU:0", "GPU:0", 2, False, _OF_ONE)),
        (8, {}, (SERVER, "-", "GPU:0", "GPU:0", 2, False, _OF_ONE)),
        (8, {"gpus": [2, 5]}, (SERVER, "-", "GPU:2", "GPU:2", 2, False, _OF_ONE)),
        (
            8,
            {"variable_update": "auto"},
            (COPIES, "nccl", "GPU:0", "-", 2, False, _OF_MANY),
        ),
        (
            8,
            {"variable_update": "auto", "cpu_relocation": True},
            (SERVER, "-", "CPU:0", "CPU:0", 2, False, _OF_ONE),
        ),
        (8, {"cpu_merge": True}, (SERVER, "-", "GPU:0", "CPU:0", 2, False, _OF_ONE)),
        (
            8,
            {"variable_update": ParameterServer("gpu:3")},
            (SERVER, "-", "GPU:3", "GPU:3", 2, False, _OF_ONE),
        ),
        (
            8,
            {"variable_update": ParameterServer("gpu:3"), "cpu_merge": False},
            (SERVER, "-", "GPU:3", "GPU:0", 2, False, _OF_ONE),
        ),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else str(value),
)
def test_defaults_in_python(machine, gpus, options, expected):
    machine(gpus)
    parallel = multi_gpu_model(_unbuilt(), **options)
    parallel.compile("sgd", "mse")
    # What Keras makes of "auto", which is none of ours.
    assert parallel.__wrapped__.jit_compile
    assert _default(parallel) == expected
