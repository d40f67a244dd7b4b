"""Batches that are sent in small types: what travels, and that no number changes."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import as_on_gpu, executed
from tests.towers.train.runs import assembled, run_here
from tests.valued import valued
from tests.variants import slow
from towers import input_pipeline, multi_gpu_model
from towers.machine import limits
from towers.model.options import OF_A_HOST, given_to_all
from towers.tower.kept import KeptExamples
from towers.tower.preprocess import OfSmallTypes

ROWS, BATCH, IDS, CLASSES = 25, 12, 250, 210
TYPES = "int32", "int64", "float32"
_numbers = itertools.count(5000)


def _loss(y, outputs):
    # In 8 bits, it would wrap around.
    return keras.ops.mean((keras.ops.cast(y[:, None] - 200, "float32") - outputs) ** 2)


class _Signed(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        del y_pred
        weight = None if sample_weight is None else sample_weight - 2
        super().update_state(keras.ops.cast(y_true - 200, "float32"), weight)


class OwnStep(keras.Model):
    """Its step takes what no loss of Keras's casts."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_loss(y, self(x, training=True)) * (weight - 3))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"signed": tf.reduce_mean(tf.cast(y - 200, tf.float32) * (weight - 3))}


def _arrays(small, rows=ROWS):
    random = np.random.default_rng(0)
    types = ("uint8", "uint8", "uint8") if small else TYPES
    most = IDS, CLASSES, 2
    shapes = (rows, 3), (rows,), (rows,)
    return tuple(
        random.integers(0, n, shape).astype(dtype)
        for n, shape, dtype in zip(most, shapes, types, strict=True)
    )


def _data(small, rows=ROWS):
    return tf.data.Dataset.from_tensor_slices(_arrays(small, rows)).batch(BATCH)


def _scaled(x, y, training):
    return x - 240, y + tf.cast(training, y.dtype)


def _model(kind=keras.Model, name=None):
    keras.utils.set_random_seed(7)
    inputs = keras.Input((3,), dtype="int32")
    hidden = keras.layers.Embedding(IDS, 4)(keras.ops.absolute(inputs))
    hidden = keras.layers.Flatten()(hidden)
    return kind(inputs, keras.layers.Dense(2)(hidden), name=name)


def _compiled(model, **options):
    metrics = {"metrics": [_Signed("signed")], "weighted_metrics": [_Signed("other")]}
    if options.pop("own_step", False):
        metrics = {}
    model.compile(keras.optimizers.SGD(0.01), _loss, **metrics, **options)
    return model


def _on_towers(small, way="parameter_server", kind=keras.Model, **options):
    """Weights, logs of `fit` and `evaluate`, and predictions."""
    prefetch = options.pop("prefetch", 2)
    model = _model(kind)
    function = OfSmallTypes(_scaled, TYPES) if small else _scaled
    towers = multi_gpu_model(
        model, 3, preprocess=function, prefetch=prefetch, **valued(way)
    )
    _compiled(towers, own_step=kind is OwnStep, **options)
    logs = towers.fit(_data(small), epochs=2, shuffle=False, verbose=0).history
    values = towers.evaluate(_data(small), verbose=0) if kind is keras.Model else []
    return model.get_weights(), logs, values, towers.predict(_data(small), verbose=0)


def _on_one_device():
    """The same with Keras alone, in the large types, preprocessed in the data."""
    model = _compiled(_model())

    def preprocessed(training):
        # Metrics would take the targets after preprocessing, so they are left out.
        return _data(False).map(lambda x, y, w: (*_scaled(x, y, training), w))

    logs = model.fit(preprocessed(True), epochs=2, shuffle=False, verbose=0).history
    predicted = model.predict(preprocessed(False), verbose=0)
    return model.get_weights(), logs["loss"], predicted


def _assert_same(found, wanted):
    for one, other in zip(
        keras.tree.flatten(found), keras.tree.flatten(wanted), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("parameter_server", {}),
        slow("parameter_server", {"steps_per_execution": 2}),
        slow("parameter_server", {"prefetch": 0}),
        slow("parameter_server", {"run_eagerly": True}),
        slow("replicated", {}),
        slow("sharded", {}),
        slow("parameter_server", {"kind": OwnStep}),
    ],
)
def test_numbers_are_those_of_large_types(way, options):
    small = _on_towers(True, way, **options)
    _assert_same(small, _on_towers(False, way, **options))
    if "kind" not in options:
        weights, losses, predicted = _on_one_device()
        for found, wanted in zip(small[0], weights, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(small[1]["loss"], losses, rtol=1e-5)
        np.testing.assert_allclose(small[3], predicted, rtol=1e-4, atol=1e-6)
        # The metric is of the targets as the data have them.
        y = np.concatenate([y for _, y, _ in _data(False).as_numpy_iterator()])
        assert small[1]["signed"] == pytest.approx([np.mean(y - 200.0)] * 2, rel=1e-5)


def _shuffled():
    """Row numbers, in another order in each epoch."""
    numbers = tf.data.Dataset.range(ROWS).shuffle(ROWS, seed=1)
    return numbers.map(lambda n: (tf.cast(n, tf.int32),)).batch(BATCH)


def _on_kept(way, keeps, **options):
    arrays = tuple(map(tf.constant, _arrays(True)))
    kept = KeptExamples(_arrays(True)) if keeps else None
    model = _model()
    data = _shuffled()
    if not keeps:
        data = data.map(lambda n: tuple(tf.gather(a, n) for a in arrays))
    towers = multi_gpu_model(
        model, 3, preprocess=OfSmallTypes(_scaled, TYPES, kept), **valued(way)
    )
    _compiled(towers, **options)
    logs = towers.fit(data, epochs=3, verbose=0).history
    return model.get_weights(), logs, towers.evaluate(data, verbose=0)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("parameter_server", {}),
        slow("parameter_server", {"steps_per_execution": 2}),
        slow("parameter_server", {"run_eagerly": True}),
        slow("parameter_server", {"jit_compile": True}),
        slow("replicated", {}),
        slow("sharded", {}),
    ],
)
def test_numbers_are_those_of_examples_that_are_sent(way, options):
    _assert_same(_on_kept(way, True, **options), _on_kept(way, False, **options))


@pytest.mark.parametrize("towers", [2, slow(4)])
def test_of_examples_that_stay_only_row_numbers_travel(towers):
    picture = 48 * 48 * 3
    x = np.random.default_rng(0).integers(0, 256, (16, 48, 48, 3), np.uint8)
    kept = KeptExamples((x, np.arange(16, dtype=np.uint8) % 3, None))
    name = f"kept_{next(_numbers)}"
    inputs = keras.Input((48, 48, 3))
    outputs = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(inputs))
    model = keras.Model(inputs, outputs, name=name)
    function = OfSmallTypes(
        lambda x, y, _: (tf.cast(x, tf.float32), y), (None, "int64", None), kept
    )
    parallel = multi_gpu_model(
        model, towers, preprocess=function, **valued("parameter_server")
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile("sgd", loss, metrics=["accuracy"])
    numbers = np.arange(16, dtype=np.int32)[::-1]
    nodes = executed.run(lambda: parallel.train_on_batch(numbers), name)
    sizes = executed.sizes(nodes, parallel.builder.graph)
    for source, target, _, made_by in executed.transfers(nodes):
        assert sizes.get(made_by, 8) < picture, (source, target, made_by)
    sent = [t for t in executed.transfers(nodes) if "strided_slice" in t[3]]
    assert [sizes[t[3]] for t in sent] == [16 // towers * 4] * (towers - 1)
    assert kept.bytes == 16 * (picture + 1)


@pytest.mark.slow
def test_asynchronous_towers_take_small_types():
    towers = multi_gpu_model(
        _model(), 2, preprocess=OfSmallTypes(_scaled, TYPES), **valued("asynchronous")
    )
    logs = _compiled(towers).fit(_data(True), shuffle=False, verbose=0).history
    y = np.concatenate([y for _, y, _ in _data(False).as_numpy_iterator()])
    assert np.isfinite(logs["loss"]).all()
    assert logs["signed"] == pytest.approx([np.mean(y - 200.0)], rel=1e-5)


GPUS = "/device:CPU:1", "/device:CPU:2"


def _sent_to_gpus(small, name):
    """The integers with rows that go to GPUs, from a host that has the table."""
    with as_on_gpu.made_up_gpus(*GPUS):
        model = _model(name=name)
        function = OfSmallTypes(lambda x, y, _: (x, y), TYPES) if small else None
        options = {"preprocess": function, "prefetch": 0}
        way = valued("parameter_server", device="/device:CPU:0")
        towers = multi_gpu_model(model, GPUS, **options, **way)
        towers.compile("sgd", _loss, jit_compile=False)
        data = _data(small, rows=24)
        nodes = executed.run(lambda: towers.fit(data, verbose=0), name)
    return [
        (source, target, dtype.name)
        for source, target, dtype, made_by in executed.transfers(nodes)
        if dtype.is_integer and dtype != tf.int32 and "Shape" not in made_by
    ]


def test_ids_of_a_table_on_the_host_stay_there():
    small = _sent_to_gpus(True, f"small_{next(_numbers)}")
    large = _sent_to_gpus(False, f"large_{next(_numbers)}")
    # Labels, as before, and weights.
    assert {target for _, target, _ in small} <= {*GPUS}, small
    ids = [sent for sent in small if sent[2] == "uint8"]
    assert len(ids) == len(GPUS), (small, large)


PICTURES = "--dataset=synthetic:8x8x3:7:32", "--model=cnn"
TEXT = "--dataset=text:python", "--model=transformer_lm", "--sequence_length=24"
TABLES = "--dataset=zipf:3:2x300:64", "--model=dlrm"


def _masks(folder):
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (24, 8, 8, 3), np.uint8)
    y = random.integers(0, 5, (24, 8, 8)).astype(np.uint8)
    y[0, 0, 0] = 255
    np.savez(folder / "masks.npz", x_train=x, y_train=y)
    flags = "--task=segmentation", "--num_classes=5", "--model=unet"
    return f"--dataset=npz:{folder / 'masks.npz'}", *flags


def _sentences(folder):
    rows = [
        "".join(f"w{i} {'O' if i % 2 else 'B-X'}\n" for i in range(3 + k % 5))
        for k in range(24)
    ]
    (folder / "some.conll").write_text("\n".join(rows))
    flags = "--sequence_length=8", "--model=transformer_encoder"
    return f"--dataset=conll:{folder / 'some.conll'}", *flags


# The bytes of an example on its way, and before.
SENT = {
    "pictures": (PICTURES, 8 * 8 * 3 + 1, 8 * 8 * 3 + 8),
    "pictures, mixed": ((*PICTURES, "--mix=mixup:0.2,cutmix:1"), 193, 200),
    # The bytes of a text, and padding, are 257 tokens.
    "text": (TEXT, 24 * (2 + 2), 24 * (4 + 8)),
    "tables": (TABLES, 3 * 4 + 2 * 2 + 1, 3 * 4 + 2 * 8 + 8),
    "masks": (_masks, 64 * (3 + 1 + 1), 64 * (3 + 8 + 4)),
    "sentences": (_sentences, 8 * (2 + 1 + 1), 8 * (4 + 8 + 4)),
}


def _job(kind, towers, folder, *more):
    flags, *sizes = SENT[kind]
    folder.mkdir(exist_ok=True)
    flags = flags(folder) if callable(flags) else flags
    job = assembled(
        *(*flags, f"--num_gpus={towers}", "--batch_size=8", "--deterministic"),
        *("--variable_update=parameter_server", f"--model_dir={folder}", *more),
    )
    return job, *sizes


def _size(nest):
    return sum(np.asarray(array).nbytes for array in tf.nest.flatten(nest))


@pytest.mark.parametrize(
    ("kind", "towers"),
    [
        ("pictures", 2),
        ("text", 2),
        *(slow(kind, 4) for kind in SENT),
        *(slow(kind, 2) for kind in SENT if kind not in ("pictures", "text")),
    ],
)
def test_bytes_that_travel_to_a_tower(kind, towers, tmp_path):
    job, small, large = _job(kind, towers, tmp_path)
    batch = next(job.data.training.as_numpy_iterator())
    wide = next(job.data.open_training(compact=False).as_numpy_iterator())
    assert (_size(batch), _size(wide)) == (8 * small, 8 * large)
    name = f"/place_{next(_numbers)}"
    with tf.name_scope(name[1:]):
        call = job.parallel.train_on_batch
        nodes = executed.run(lambda: call(*batch), "strided_slice")
    sizes = executed.sizes(nodes, job.parallel.builder.graph)
    host, *others = [f"/device:CPU:{k}" for k in range(towers)]
    for tower in others:
        sent = [
            sizes[made_by]
            for source, target, _, made_by in executed.transfers(nodes)
            if (source, target) == (host, tower) and "strided_slice" in made_by
        ]
        assert sum(sent) == 8 // towers * small, (tower, sent)


@pytest.mark.parametrize(
    "kind", ["text", *(slow(kind) for kind in SENT if kind != "text")]
)
def test_a_run_has_the_numbers_of_large_types(kind, tmp_path):
    results = []
    for compact in (True, False):
        keras.backend.clear_session()
        job, *_ = _job(kind, 3, tmp_path / str(compact))
        training = job.data.open_training(compact=compact, repeat=False).take(3)
        logs = job.parallel.fit(training, shuffle=False, verbose=0).history
        evaluated = job.parallel.evaluate(training, verbose=0)
        results.append((job.model.get_weights(), logs, evaluated))
    _assert_same(*results)


def _epochs(kind, folder, *flags):
    keras.backend.clear_session()
    job, *_ = _job(kind, 3, folder, "--num_gpus=3", "--train_epochs=2", *flags)
    logs = job.parallel.fit(
        job.data.training,
        validation_data=job.data.evaluation,
        epochs=2,
        steps_per_epoch=job.data.steps_per_epoch(),
        shuffle=False,
        verbose=0,
    )
    return job, (job.model.get_weights(), logs.history)


@pytest.mark.parametrize(
    "kind",
    ["pictures", *(slow(kind) for kind in SENT if kind not in ("pictures", "text"))],
)
def test_a_run_whose_examples_stay_on_the_devices(kind, tmp_path):
    job, wanted = _epochs(kind, tmp_path / "sent")
    count = job.data.examples
    job, found = _epochs(kind, tmp_path / "kept", "--cache=devices")
    (spec,) = job.data.training.element_spec
    assert (spec.dtype, spec.shape.rank) == (tf.int64, 1)
    _assert_same(found, wanted)
    assert any("stay on the devices: " in note for note in job.notes), job.notes
    assert count == job.data.examples


def test_examples_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "free_memory", lambda: 12_000)
    with pytest.raises(ValueError, match=r"take 6.0 KB on each of 2 towers, of 3.9 KB"):
        _job("pictures", 2, tmp_path, "--cache=devices")


@pytest.mark.parametrize(
    "other", ["--recipe=cifar", "--class_weight=0:2", "--stages=2"]
)
def test_flags_that_do_not_go_with_examples_that_stay(other, tmp_path):
    with pytest.raises(ValueError, match=f"--cache=devices with {other}"):
        _job("pictures", 2, tmp_path, "--cache=devices", other)


@pytest.mark.slow
def test_a_run_goes_on_with_examples_that_stay(tmp_path):
    flags = *PICTURES, "--batch_size=8", "--deterministic", "--train_epochs=2"
    models = []
    for name, steps in {"whole": [8], "parts": [3, 8]}.items():
        folder = tmp_path / name
        for most in steps:
            keras.backend.clear_session()
            run_here(
                *(*flags, f"--model_dir={folder}", "--cache=devices"),
                *("--num_gpus=2", "--variable_update=parameter_server"),
                f"--max_train_steps={most}",
            )
        models.append(keras.models.load_model(folder / "model.keras").get_weights())
    _assert_same(*models)


def test_hosts_may_differ_in_what_preprocesses():
    """A preprocessing with fields of its own was once taken for a way to update."""

    @dataclasses.dataclass
    class Options:
        preprocess: object = dataclasses.field(metadata=OF_A_HOST)
        strict: bool = True

    given = given_to_all(Options(OfSmallTypes(_scaled, TYPES)))
    assert given == {"strict": True}


def test_an_id_that_is_too_large_is_an_error():
    source = input_pipeline.open_source("zipf:3:2x300:64")
    source.prepare()
    data = input_pipeline.make_dataset(source, "train", 8, compact=True)
    source.table_sizes = dict.fromkeys(source.table_sizes, 20)
    few = input_pipeline.make_dataset(source, "train", 8, compact=True)
    assert len([*data]) == 8
    with pytest.raises(tf.errors.InvalidArgumentError, match="an id is not 0 to 19"):
        list(few)
