"""What a real `fit` on two towers writes to TensorBoard, read by TensorBoard itself."""

import collections
import contextlib
import functools
import itertools
import json
import os
import re
import resource
import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard import context
from tensorboard.backend.event_processing import data_provider as data_provider_lib
from tensorboard.backend.event_processing import plugin_event_multiplexer
from tensorboard.compat.proto import graph_pb2
from tensorboard.plugins import base_plugin
from tensorboard.plugins.custom_scalar import custom_scalars_plugin
from tensorboard.plugins.graph import graphs_plugin
from tensorboard.plugins.hparams import (
    api_pb2,
    backend_context,
    get_experiment,
    list_session_groups,
)
from tensorboard.plugins.scalar import scalars_plugin
from tensorboard.util import tensor_util
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tests import small
from tests.variants import slow
from towers import multi_gpu_model
from towers.monitoring.profile import callback as profile
from towers.monitoring.profile.callback import Profile, add_towers
from towers.monitoring.tensorboard import graph, pictures
from towers.monitoring.tensorboard.callback import TensorBoard

HPARAMS = {"model": "cnn", "learning_rate": 0.1, "batch_size": 8, "clipped": True}


def data(examples=20, batch=8):
    """Batches of (images in [-1, 1], labels), the last one short."""
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (examples, 4, 4, 1)).astype("float32")
    y = random.integers(0, 3, examples)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


def pixels():
    """The same images in 0..255."""
    return data().map(lambda x, y: (tf.cast((x + 1) * 127.5, tf.uint8), y))


# A model that is fitted again is not traced again.
towers = functools.cache(multi_gpu_model)


@functools.cache
def _made(**options):
    return small.tiny(metrics=["accuracy"], **options)


def build(**options):
    """The model of other tests, with no step done."""
    model = _made(**options)
    model.optimizer.iterations.assign(0)
    return model


def fit(model, *callbacks, gpus=2, builder="parameter_server", **options):
    """Fits on two towers: three steps an epoch."""
    parallel = towers(model, gpus=gpus, variable_update=builder)
    return parallel.fit(
        data(), callbacks=list(callbacks), verbose=0, shuffle=False, **options
    )


class Board:
    """TensorBoard's own view of a directory."""

    def __init__(self, folder):
        # It reads files by name: of one second, 11 would come before 9.
        for path in folder.rglob("events.*.v2"):
            *begin, number, end = path.name.split(".")
            path.rename(path.with_name(".".join([*begin, number.zfill(9), end])))
        self.runs = plugin_event_multiplexer.EventMultiplexer()
        self.runs.AddRunsFromDirectory(str(folder))
        self.runs.Reload()
        self.provider = data_provider_lib.MultiplexerDataProvider(self.runs, folder)
        plugins = {}
        self.context = base_plugin.TBContext(
            data_provider=self.provider, plugin_name_to_instance=plugins
        )
        # The one of custom scalars asks it.
        plugins["scalars"] = scalars_plugin.ScalarsPlugin(self.context)
        self.request = context.RequestContext()

    def tags(self, run, plugin):
        return self.runs.PluginRunToTagToContent(plugin).get(run, {}).keys()

    def values(self, run, tag):
        """What was written, as (step, array)."""
        return [
            (event.step, tensor_util.make_ndarray(event.tensor_proto))
            for event in self.runs.Tensors(run, tag)
        ]

    def steps(self, run, tag):
        return [step for step, _ in self.values(run, tag)]

    def text(self, run, tag):
        ((step, text),) = self.values(run, tag)
        return step, text.item().decode()

    def pictures(self, run, tag):
        ((step, (_, _, *encoded)),) = self.values(run, tag)
        return step, [tf.io.decode_png(png).numpy() for png in encoded]

    def graph(self, run="train"):
        """The graph that the page of graphs opens with."""
        plugin = graphs_plugin.GraphsPlugin(self.context)
        assert plugin.info_impl(self.request, "")[run]["run_graph"]
        raw = plugin._read_blob(
            self.request, "", [graphs_plugin.metadata.PLUGIN_NAME], run, "__run_graph__"
        )
        return graph_pb2.GraphDef.FromString(raw)

    def layout(self):
        plugin = custom_scalars_plugin.CustomScalarsPlugin(self.context)
        return json.loads(plugin.layout_impl(self.request, ""))

    def experiment(self):
        backend = backend_context.Context(self.context)
        request = api_pb2.GetExperimentRequest(include_metrics=True)
        return get_experiment.Handler(self.request, backend, "", request).run()

    def sessions(self):
        """The rows of the page of hyper-parameters: {name: (parameters, metrics)}."""
        experiment = self.experiment()
        columns = [
            api_pb2.ColParams(metric=info.name) for info in experiment.metric_infos
        ]
        columns += [
            api_pb2.ColParams(hparam=info.name, include_in_result=True)
            for info in experiment.hparam_infos
        ]
        request = api_pb2.ListSessionGroupsRequest(
            allowed_statuses=[api_pb2.STATUS_UNKNOWN],
            col_params=columns,
            slice_size=10,
            include_metrics=True,
        )
        backend = backend_context.Context(self.context)
        found = list_session_groups.Handler(self.request, backend, "", request).run()
        names = {info.name.tag: info.display_name for info in experiment.metric_infos}
        return {
            group.name: (
                {
                    name: getattr(value, value.WhichOneof("kind"))
                    for name, value in group.hparams.items()
                },
                {names[m.name.tag]: m.value for m in group.metric_values},
            )
            for group in found.session_groups
        }


@pytest.fixture
def run(tmp_path):
    """Returns a function that trains, and one that reads what was written."""

    def train(model, epochs=2, initial_epoch=0, name="", validated=False, **options):
        callback = TensorBoard(str(tmp_path / name), log_steps=2, **options)
        return fit(
            model,
            callback,
            validation_data=data() if validated else None,
            epochs=epochs,
            initial_epoch=initial_epoch,
        )

    return types.SimpleNamespace(
        train=train, read=lambda: Board(tmp_path), folder=tmp_path
    )


@pytest.fixture
def file_limit():
    """Returns a context in which files cannot grow beyond some bytes."""

    @contextlib.contextmanager
    def limited(limit_bytes):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.mark.parametrize("steps", [0, -1])
def test_bad_number_of_steps(steps):
    with pytest.raises(ValueError, match=rf"log_steps={steps}; expected at least 1"):
        TensorBoard("x", steps)


class TestWriting:
    @pytest.mark.slow
    def test_where_the_disk_is_full_training_goes_on(self, run, file_limit, capsys):
        with file_limit(20_000):
            model = small.build(units=64)
            history = run.train(model, epochs=9, histograms=True, validated=True)
        assert len(history.history["loss"]) == 9
        (said,) = [s for s in capsys.readouterr().err.splitlines() if "towers" in s]
        assert said == (
            "towers: TensorBoard shows nothing of the run from here on, as it could "
            "not be written: File too large."
        )
        assert run.read().steps("train", "epoch_loss")[0] == 1

    def test_where_nothing_can_be_written(self, run, capsys):
        (run.folder / "train").touch()
        run.train(build(), epochs=1, validated=True)
        assert "could not be written: " in capsys.readouterr().err

    def test_what_is_wrong_with_the_data_is_not_taken_for_that(self, run, capsys):
        broken = pixels().map(lambda x, y: (tf.io.decode_png(b"broken"), y))
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"PNG"):
            run.train(build(), epochs=1, examples=broken)
        assert "towers: " not in capsys.readouterr().err

    def test_fits_with_one_callback(self, run):
        callback = TensorBoard(str(run.folder), 2)
        model = build()
        fit(model, callback)
        fit(model, callback)
        board = run.read()
        assert board.steps("train", "batch_loss") == [2, 4, 6]

    def test_what_was_written_when_training_is_broken_off(self, run):
        def fails(batch, logs):
            if batch == 2:
                raise KeyboardInterrupt

        callback = TensorBoard(str(run.folder), 1)
        breaks = keras.callbacks.LambdaCallback(on_train_batch_end=fails)
        with pytest.raises(KeyboardInterrupt):
            fit(build(), callback, breaks)
        assert run.read().steps("train", "batch_loss") == [1, 2, 3]
        assert not callback._writers


def test_nothing_is_written_before_training(tmp_path):
    TensorBoard(str(tmp_path), 2, texts={"a": "b"}, examples=pixels())
    assert not list(tmp_path.iterdir())


class TestScalars:
    @pytest.mark.slow
    def test_are_keras_own(self, run):
        adam = keras.optimizers.Adam(0.25)
        history = run.train(build(optimizer=adam), validated=True).history
        board = run.read()
        values = {"train": ["loss", "accuracy", "learning_rate"]}
        values["validation"] = ["loss", "accuracy"]
        for name, each in values.items():
            expected = {f"{p}_{value}" for p in ("epoch", "batch") for value in each}
            assert board.tags(name, "scalars") == expected
        for tag in board.tags("train", "scalars"):
            expected = [1, 2] if tag.startswith("epoch_") else [2, 4, 6]
            assert board.steps("train", tag) == expected, tag
        # Validation is at the steps that it was made after.
        assert board.steps("validation", "epoch_loss") == [1, 2]
        assert board.steps("validation", "batch_loss") == [3, 6]
        for name, prefix in (("train", ""), ("validation", "val_")):
            for value in ("loss", "accuracy"):
                found = [v for _, v in board.values(name, f"epoch_{value}")]
                assert found == pytest.approx(history[prefix + value])
        rates = [v for _, v in board.values("train", "batch_learning_rate")]
        assert rates == [0.25] * 3

    def test_measures_are_asked_at_recorded_batches_and_at_the_end(self, run):
        calls = itertools.count()

        def measured():
            count = next(calls)
            # What is measured may change from time to time.
            return {"waiting": count / 4, **({"late": 5.0} if count else {})}

        run.train(build(), measures=[measured, lambda: {"device/cpu:0/load": 2.0}])
        board = run.read()
        assert board.values("train", "waiting") == [(2, 0.0), (4, 0.25), (6, 0.5)]
        assert board.values("train", "late") == [(4, 5.0), (6, 5.0)]
        assert board.steps("train", "device/cpu:0/load") == [2, 4, 6]

    def test_measures_of_a_run_that_ends_between_two(self, run):
        run.train(build(), epochs=1, measures=[lambda: {"waiting": 1.0}])
        assert run.read().steps("train", "waiting") == [2, 3]

    def test_numbers_of_the_whole_run(self, run):
        run.train(build(), epochs=1, scalars={"bad_records": 7, "unknown": None})
        board = run.read()
        assert board.values("train", "bad_records") == [(0, 7)]
        assert "unknown" not in board.tags("train", "scalars")

    def test_steps_go_on_in_a_resumed_run(self, run):
        model = build()
        run.train(model, 1, texts={"flags": "once"}, validated=True)
        run.train(model, 3, 1, texts={"flags": "twice"}, validated=True)
        board = run.read()
        assert board.steps("train", "batch_loss") == [2, 4, 6, 8]
        assert board.steps("train", "epoch_loss") == [1, 2, 3]
        assert board.steps("validation", "batch_loss") == [3, 6, 9]
        assert board.values("train", "flags") == [(0, b"once"), (3, b"twice")]

    @pytest.mark.slow
    def test_several_steps_in_a_call(self, run):
        run.train(build(steps_per_execution=3), epochs=2)
        assert run.read().steps("train", "batch_loss") == [3, 6]

    @pytest.mark.slow
    def test_learning_rate_of_a_schedule_under_a_loss_scale(self, run):
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.5, 0.125])
        sgd = keras.optimizers.SGD(schedule)
        run.train(build(optimizer=keras.optimizers.LossScaleOptimizer(sgd, 2.0)))
        found = run.read().values("train", "batch_learning_rate")
        assert found == [(2, 0.5), (4, 0.125), (6, 0.125)]


class TestTextsAndHistograms:
    def test_texts_that_are_known_at_the_end_only(self, run):
        model = build()
        steps = model.optimizer.iterations
        texts = {"flags": "    --model=cnn\n", "verdict": lambda: f"{int(steps)} steps"}
        run.train(model, texts=texts)
        board = run.read()
        assert board.text("train", "flags") == (0, "    --model=cnn\n")
        assert board.text("train", "verdict") == (6, "6 steps")

    @pytest.mark.slow
    def test_histograms_of_all_weights_on_request(self, run):
        model = small.build()
        run.train(model, histograms=True)
        board = run.read()
        expected = {f"{weight.path}/histogram": weight for weight in model.weights}
        assert board.tags("train", "histograms") == expected.keys()
        for tag, weight in expected.items():
            (first, _), (last, buckets) = board.values("train", tag)
            assert (first, last) == (1, 2)
            left, right, count = buckets.T
            assert count.sum() == np.size(weight)
            kept = np.array(weight)
            if kept.ndim:
                assert left[0] == pytest.approx(kept.min(), abs=1e-6)
                assert right[-1] == pytest.approx(kept.max(), abs=1e-6)

    def test_no_histograms_by_default(self, run):
        run.train(build(), epochs=1)
        assert not run.read().tags("train", "histograms")


class TestGraph:
    def written(
        self, folder, builder="parameter_server", gpus=2, stages=(1, 1), **options
    ):
        """Trains and returns the graph's nodes by name, each with its inputs' nodes."""
        model = small.build(**options)
        stages = {"stages": stages[0], "micro_batches": stages[1]}
        parallel = multi_gpu_model(model, gpus, variable_update=builder, **stages)
        callback = TensorBoard(str(folder), 2, graph=lambda: parallel.builder.graph)
        parallel.fit(data(), callbacks=[callback], verbose=0, shuffle=False)
        nodes = Board(folder).graph().node
        by_name = {node.name: node for node in nodes}
        assert len(by_name) == len(nodes)
        for node in nodes:
            assert {_node(name) for name in node.input} <= by_name.keys()
        return by_name

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("builder", "steps"),
        [
            ("parameter_server", 1),
            ("replicated", 3),
            ("parameter_server", 3),
            ("replicated", 1),
        ],
    )
    def test_shows_what_each_tower_does(self, tmp_path, builder, steps):
        nodes = self.written(tmp_path, builder, steps_per_execution=steps)
        scopes = collections.defaultdict(collections.Counter)
        for name, node in nodes.items():
            part, _, rest = name.partition("/")
            # The second tower may be idle, and so looks at its size; and it copies what
            # the first one, which is at home, has there.
            if node.op not in ("Greater", "Const", "Identity"):
                scopes[part][rest, node.op] += 1
        parts = {"home", "tower_0", "tower_1", "reduce", "apply"}
        assert parts <= scopes.keys()
        assert scopes["tower_0"] == scopes["tower_1"]
        found = {name for name, _ in scopes["tower_0"]}
        # Forward and backward, by layer.
        assert any(each.endswith("/dense_1/MatMul") for each in found), found
        assert any(each.startswith("gradient_tape/") for each in found)
        assert not any("PartitionedCall" in node.op for node in nodes.values())
        if (builder, steps) == ("parameter_server", 1):
            self.check_edges_lead_through_the_towers(nodes)

    def check_edges_lead_through_the_towers(self, nodes):
        def behind(name):
            seen, left = set(), [name]
            while left:
                inputs = {_node(each) for each in nodes[left.pop()].input} - seen
                seen |= inputs
                left += inputs
            return seen

        sums = [name for name in nodes if name.startswith("reduce/AddN")]
        assert sums
        for name in sums:
            before = {each.partition("/")[0] for each in behind(name)}
            assert {"tower_0", "tower_1", "home", "IteratorGetNext"} <= before

    @pytest.mark.slow
    @pytest.mark.parametrize("steps", [1, 3])
    def test_shows_stages_and_micro_batches(self, tmp_path, steps):
        nodes = self.written(tmp_path, gpus=4, stages=(2, 2), steps_per_execution=steps)
        scopes = {"/".join(name.split("/")[:3]) for name in nodes}
        towers = {name for name in scopes if name.startswith("tower_")}
        assert towers == {
            f"tower_{k}/micro_batch_{m}/stage_{stage}"
            for k, m, stage in itertools.product(range(2), repeat=3)
        }
        with_loss = {
            "/".join(name.split("/")[:3]) for name in nodes if "/compile_loss/" in name
        }
        # Home divides what the towers' parts add up to.
        with_loss = {name for name in with_loss if not name.startswith("home")}
        assert with_loss == {name for name in towers if name.endswith("stage_1")}

    @pytest.mark.slow
    def test_asynchronous_towers_do_all_the_same(self, tmp_path):
        nodes = self.written(tmp_path, "asynchronous")
        towers = {name.partition("/")[0] for name in nodes if "tower" in name}
        assert towers == {"tower"}

    @pytest.mark.slow
    def test_calls_stay_where_there_are_too_many_nodes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(graph, "_MOST_NODES", 10)
        nodes = self.written(tmp_path)
        calls = [name for name, node in nodes.items() if "PartitionedCall" in node.op]
        assert {name.partition("/")[0] for name in calls} >= {"tower_0", "tower_1"}

    def test_none_where_there_is_none(self, run):
        run.train(build(), epochs=1, graph=lambda: None)
        assert not run.read().tags("train", "graphs")


class TestPictures:
    def test_examples_as_the_model_learns_from_them(self, run):
        names = ["ant", "bee", "cat"]
        run.train(build(), epochs=1, examples=pixels(), class_names=names)
        board = run.read()
        step, (found,) = board.pictures("train", "input")
        images, labels = next(iter(pixels()))
        assert step == 0
        expected = pictures.sheet(images.numpy(), [names[label] for label in labels])
        np.testing.assert_array_equal(found, expected)
        assert board.text("train", "input_labels")[1].splitlines() == [
            f"{i}. {names[label]}" for i, label in enumerate(labels, 1)
        ]

    @pytest.mark.slow
    @pytest.mark.parametrize("names", [None, ["ant", "bee", "cat"]])
    def test_mistakes_and_confusion(self, run, names):
        # Labels are random, so that some are wrong for sure, and more than 16 not.
        model = small.build()
        run.train(model, epochs=1, sample=pixels(), class_names=names)
        counts, wrong, margins = np.zeros((3, 3), int), [], []
        for images, labels in pixels():
            outputs = model(tf.cast(images, tf.float32)).numpy()
            for image, label, output in zip(
                images, labels.numpy(), outputs, strict=True
            ):
                guess = output.argmax()
                counts[label, guess] += 1
                if label != guess:
                    wrong.append((image, label, guess))
                    margins.append(float(output[guess] - output[label]))
        assert 0 < len(wrong) <= 16
        # The worst ones come first.
        wrong = [wrong[i] for i in np.argsort(-np.array(margins), kind="stable")]
        board = run.read()
        step, (found,) = board.pictures("train", "misclassified")
        assert step == 3
        named = names or ["0", "1", "2"]
        captions = [f"{named[label]}\ntaken for {named[g]}" for _, label, g in wrong]
        expected = pictures.sheet(np.array([image for image, _, _ in wrong]), captions)
        np.testing.assert_array_equal(found, expected)
        _, text = board.text("train", "misclassified_as")
        assert text.splitlines() == [
            f"{i}. {named[label]}, taken for {named[guess]}"
            for i, (_, label, guess) in enumerate(wrong, start=1)
        ]
        _, text = board.text("train", "confusion_counts")
        head, _, *rows = [line.strip("| ").split("|") for line in text.splitlines()]
        assert [cell.strip() for cell in head[1:]] == named
        assert [row[0].strip("* ") for row in rows] == named
        found = [[int(cell.strip() or 0) for cell in row[1:4]] for row in rows]
        np.testing.assert_array_equal(found, counts)
        step, (picture,) = board.pictures("train", "confusion")
        assert step == 3
        np.testing.assert_array_equal(picture, pictures.confusion(counts, named))

    def test_confusion_of_rows_of_numbers(self, run):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        x = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")
        y = np.arange(6) % 3
        sample = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        board = self._mistakes_of(run, model, sample)
        guesses = model(x).numpy().argmax(-1)
        assert board.tags("train", "images") == {"confusion"}
        text = board.text("train", "misclassified_as")[1]
        assert len(text.splitlines()) == (guesses != y).sum() > 0

    def test_of_many_examples_the_first_are_looked_at(self, monkeypatch):
        monkeypatch.setattr(pictures, "MOST_EXAMPLES", 6)
        read = itertools.count()

        def batches():
            for _ in range(3):
                next(read)
                # A mistake in each batch: the third row is taken for class 2.
                yield tf.eye(3)[:, :, tf.newaxis, tf.newaxis], tf.constant([0, 1, 0])

        def predict(x):
            return x[:, :, 0, 0].numpy()

        found = pictures.find_mistakes(predict, batches(), most=1)
        assert next(read) == 2 and found.confusions.examples == 6
        assert found.confusions.mistakes == 2 and len(found.worst) == 1
        (worst,) = found.worst
        assert (worst.label, worst.guess, worst.margin) == (0, 2, 1.0)
        np.testing.assert_array_equal(worst.image[:, 0, 0], [0, 0, 1])

    def test_a_label_that_names_no_class_is_left_out(self):
        images = tf.eye(3)[:, :, tf.newaxis, tf.newaxis]
        batches = [(images, tf.constant([-1, 3, 0]))]
        outputs = images[:, :, 0, 0].numpy()
        mistakes = pictures.find_mistakes(lambda x: outputs, batches)
        assert (mistakes.confusions.examples, mistakes.confusions.mistakes) == (1, 1)
        (worst,) = mistakes.worst
        assert (worst.label, worst.guess) == (0, 2)
        np.testing.assert_array_equal(worst.image[:, 0, 0], [0, 0, 1])

    def test_photographs_are_shrunk(self):
        images = np.full((4, 700, 900, 3), 200, np.uint8)
        drawn = pictures.sheet(images, ["one"] * 4)
        # Two by two, of 199 x 256 pixels each, and their captions.
        assert 400 < drawn.shape[0] < 460 and 512 < drawn.shape[1] < 540

    def test_a_picture_of_a_matrix(self):
        counts = np.array([[4, 0, 0], [1, 0, 3], [0, 0, 0]])
        picture = pictures.matrix(counts)
        cell = picture.shape[0] // 3
        found = picture[cell // 2 :: cell, cell // 2 :: cell].astype(int)
        blue, red = found[..., 2] > found[..., 0], found[..., 0] > found[..., 2]
        np.testing.assert_array_equal(blue, counts * np.eye(3, dtype=int) > 0)
        np.testing.assert_array_equal(red, counts * (1 - np.eye(3, dtype=int)) > 0)
        assert (found[counts == 0] == 255).all()
        # Three of four are darker than one of four.
        assert found[1, 2].sum() < found[1, 0].sum()

    def test_a_matrix_has_words_beside_it(self):
        """Names at the rows and below the columns: another name is seen there."""
        counts, side = np.array([[4, 0], [1, 3]]), pictures.matrix(np.eye(2)).shape[0]
        picture = pictures.confusion(counts, ["ant", "bee"])
        other = pictures.confusion(counts, ["ant", "eeb"])
        assert picture.shape == other.shape
        top, right = 6, picture.shape[1] - 6
        left, bottom = right - side, top + side
        rows, columns = np.nonzero((picture != other).any(axis=-1))
        beside, below = columns < left, rows >= bottom
        assert beside.any() and below.any() and (beside | below).all()
        # The second row, and the second column.
        assert (rows[beside] >= top + side // 2).all()
        assert (columns[below] >= left + side // 2).all()
        # Inside are the counts, and nowhere else is something between the cells.
        inside = picture[top:bottom, left:right]
        changed = (inside != pictures.matrix(counts)).any(axis=-1)
        cells = changed.reshape(2, side // 2, 2, side // 2).any(axis=(1, 3))
        np.testing.assert_array_equal(cells, counts > 0)

    def test_pictures_have_their_words_below_them(self):
        images = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4, 1)
        found = pictures.sheet(images, ["ant", "bee", "cat"])
        # Two in a row, with squares for pixels.
        corner = found[6:102:24, 6:102:24, 0]
        np.testing.assert_array_equal(corner, images[0, ..., 0])
        other = pictures.sheet(images, ["ant", "eeb", "cat"])
        rows, columns = np.nonzero((found != other).any(axis=-1))
        assert rows.min() >= 102 and rows.max() < 125 and columns.min() >= 108
        # Some words are wider than the picture.
        wider = pictures.sheet(images[:1], ["taken for validation"])
        assert 108 < wider.shape[1] <= 132

    @pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 16])
    def test_pictures_of_any_number_of_channels(self, channels):
        images = np.full([1, 96, 96, channels], 200, np.uint8)
        images[..., 3:] = 255
        found = pictures.sheet(images, ["ant"])
        assert (found[6:102, 6:102] == 200).all()

    def test_a_folder_that_is_no_utf_8(self):
        name = pictures.Classes([os.fsdecode(b"caf\xe9")])[0]
        assert name == "caf?" and tf.constant(name).numpy() == b"caf?"

    def test_a_font_of_ascii(self):
        assert pictures.plain("Ägyptische Katze") == "Agyptische Katze"
        assert pictures.plain("本") is pictures.plain("a\n") is None
        classes = pictures.Classes(["é", "本"])
        assert [classes.drawn(label) for label in range(2)] == ["e", "1"]
        assert classes[1] == "本"

    def test_many_classes_have_no_table(self, run):
        board = self._mistakes_of_seven(run, 21)
        assert "confusion" in board.tags("train", "images")
        assert "confusion_counts" not in board.tags("train", "text")

    def test_of_many_classes_the_most_confused_are_drawn(self, run):
        """All pairs of 100,000 classes would not fit in memory."""
        board = self._mistakes_of_seven(run, 100_000)
        _, (picture,) = board.pictures("train", "confusion")
        confusions = pictures.Confusions()
        confusions.add(np.array([0, 20]), np.array([7, 7]), 100_000)
        names = [*map(str, range(30)), "all others"]
        note = ", the 30 most confused of 100,000"
        counts = confusions.among(range(30))
        expected = pictures.confusion(counts, names, note)
        np.testing.assert_array_equal(picture, expected)
        assert (picture != pictures.confusion(counts, names)).any()

    def _mistakes_of_seven(self, run, count):
        """Writes those of a model that always gives class 7, of two examples."""
        model = keras.Sequential(
            [
                keras.Input((2,)),
                keras.layers.Lambda(
                    lambda x: tf.one_hot(tf.fill([tf.shape(x)[0]], 7), count)
                ),
            ]
        )
        rows = tf.data.Dataset.from_tensor_slices((np.ones((2, 2)), [0, 20])).batch(2)
        return self._mistakes_of(run, model, rows)

    def _mistakes_of(self, run, model, batches):
        found = pictures.find_mistakes(model.predict_on_batch, batches)
        writer = tf.summary.create_file_writer(str(run.folder / "train"))
        with writer.as_default(0):
            pictures.write_mistakes(found, pictures.Classes())
        writer.close()
        return run.read()

    def test_which_classes_are_most_confused(self):
        confusions = pictures.Confusions()
        labels = np.repeat([5_000, 9_999, 40, 3], [9, 2, 3, 5])
        guesses = np.repeat([9_999, 0, 40, 9_000], [9, 2, 3, 5])
        confusions.add(labels, guesses, 10_000)
        drawn = confusions.drawn()
        assert len(drawn) == 30 and {0, 3, 5_000, 9_000, 9_999} <= {*drawn}
        assert 40 not in drawn  # its examples are right
        counts = confusions.among([5_000, 9_999])
        assert counts.tolist() == [[0, 9, 0], [0, 0, 2], [0, 0, 8]]
        assert confusions.examples == counts.sum() == 19


class TestDashboards:
    def test_layout(self, run):
        model = build()
        measured = {
            "examples_per_sec": 1.0,
            "examples_per_sec/tower_0": 1.0,
            "step_ms/input": 1.0,
            "step_ms/compute": 1.0,
            "step_ms/python": 1.0,
            "step_ms/tower_0": 1.0,
            "waiting": 0.5,
            "device/cpu:0/rss_mb": 1.0,
            "device/gpu:0/memory_mb": 1.0,
            "device/gpu:0/utilization": 1.0,
            "device/gpu:0/utilization_min": 0.0,
            "device/gpu:0/utilization_p10": 0.1,
            "device/gpu:0/utilization_median": 0.5,
        }
        run.train(model, epochs=1, measures=[lambda: measured])
        # A run that goes on does not lay it out twice.
        run.train(model, epochs=2, initial_epoch=1)
        board = run.read()
        layout = board.layout()
        titles = ["Is it learning?", "Is it fast?", "Is it starved?"]
        assert [category["title"] for category in layout["category"]] == titles
        plugin = custom_scalars_plugin.CustomScalarsPlugin(board.context)
        shown = set()
        for category in layout["category"]:
            for chart in category["chart"]:
                (tag,) = chart["multiline"]["tag"]
                found = plugin.scalars_impl(board.request, "train", tag, "")
                assert found["regex_valid"]
                assert found["tag_to_events"], chart["title"]
                shown |= found["tag_to_events"].keys()
        learning = {"epoch_loss", "epoch_accuracy", "batch_loss", "batch_learning_rate"}
        assert shown == learning | measured.keys()

    def test_hyper_parameters_of_a_run_that_goes_on(self, run):
        model = build()
        run.train(model, epochs=1, hparams=HPARAMS, validated=True)
        history = run.train(model, 2, 1, hparams=HPARAMS, validated=True).history
        ((name, (hparams, metrics)),) = run.read().sessions().items()
        assert name == f"{run.folder.name} in {run.folder.parent}"
        assert hparams == HPARAMS
        assert metrics == pytest.approx(
            {
                "train loss": history["loss"][-1],
                "train accuracy": history["accuracy"][-1],
                "validation loss": history["val_loss"][-1],
                "validation accuracy": history["val_accuracy"][-1],
            }
        )

    @pytest.mark.slow
    def test_hyper_parameters_of_several_runs(self, run):
        losses = {}
        for name, rate in (("a", 0.1), ("b", 0.5)):
            hparams = {**HPARAMS, "learning_rate": rate}
            model = build(optimizer=keras.optimizers.SGD(rate))
            options = {"name": name, "hparams": hparams, "validated": True}
            history = run.train(model, 1, **options).history
            losses[rate] = history["val_loss"][-1]
        sessions = run.read().sessions()
        assert sessions.keys() == {f"{name} in {run.folder}" for name in "ab"}
        found = {
            hparams["learning_rate"]: metrics["validation loss"]
            for hparams, metrics in sessions.values()
        }
        assert found == pytest.approx(losses)

    def test_hyper_parameters_to_be_seen_first(self, run):
        # The dashboard shows the first five columns, and orders them by itself.
        run.train(build(), epochs=1, hparams=dict.fromkeys("zyxwvcba", 1))
        columns = [info.name for info in run.read().experiment().hparam_infos]
        assert columns == [*"vwxyz", *"abc"]


class TestProfile:
    def written(self, folder):
        return list(folder.glob("plugins/profile/*/*"))

    def planes(self, folder):
        (path,) = folder.glob("plugins/profile/*/*.xplane.pb")
        return xplane_pb2.XSpace.FromString(path.read_bytes()).planes

    def recorded(self, folder):
        """The names of what was recorded, and the numbers of the steps."""
        names, steps = set(), set()
        for plane in self.planes(folder):
            stats = {key: value.name for key, value in plane.stat_metadata.items()}
            names |= {value.name for value in plane.event_metadata.values()}
            for event in (event for line in plane.lines for event in line.events):
                if plane.event_metadata[event.metadata_id].name == "train":
                    steps |= {
                        stat.int64_value or stat.uint64_value
                        for stat in event.stats
                        if stats[stat.metadata_id] == "step_num"
                    }
        return names, steps

    def test_records_the_steps_with_the_towers_names(self, tmp_path):
        fit(small.build(units=8), Profile(str(tmp_path), 2, 5), epochs=3)
        names, steps = self.recorded(tmp_path)
        assert steps == {2, 3, 4, 5}
        for tower in ("tower_0/", "tower_1/"):
            # Not of the first step: nothing is traced any more.
            assert any(n.startswith(tower) and "dense" in n for n in names), names
        # In rows of the tower's own, each operation once for each step.
        *_, plane = self.planes(tmp_path)
        counts = {"tower_0": collections.Counter(), "tower_1": collections.Counter()}
        for row in plane.lines:
            counts[row.name].update(
                plane.event_metadata[event.metadata_id].name for event in row.events
            )
        for rows in counts.values():
            # Each version numbers layers and operations in another way.
            kernel = [n for n in rows if re.search("gradient.*/dense_1/.*MatMul", n)]
            assert {rows[name] for name in kernel} == {4}, rows
        host = next(p for p in self.planes(tmp_path) if p.name == "/host:CPU")
        starts = [line.timestamp_ns for line in host.lines]
        assert all(row.timestamp_ns in starts for row in plane.lines)

    def test_training_may_end_before_the_last_step(self, tmp_path, capsys):
        fit(build(), Profile(str(tmp_path), 3, 100))
        assert self.recorded(tmp_path)[1] == {3}
        assert "profiled" not in capsys.readouterr().err

    def test_says_if_training_ended_before_the_first(self, tmp_path, capsys):
        fit(build(), Profile(str(tmp_path), 4, 5))
        said = "Nothing was profiled: training ended after step 3, before step 4."
        assert said in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_a_run_that_goes_on_behind_it_records_nothing(self, tmp_path, capsys):
        model = build()
        fit(model)
        fit(model, Profile(str(tmp_path), 2, 3))
        assert not list(tmp_path.iterdir())
        assert "profiled" not in capsys.readouterr().err

    def test_a_run_that_is_broken_off_says_where_the_trace_is(self, tmp_path, capsys):
        class Fails(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if batch == 2:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fit(build(), Profile(str(tmp_path), 2, 100), Fails())
        # Not while it runs, so that the next can be recorded.
        assert self.recorded(tmp_path)[1] >= {2}
        said = f"broken off after step 2; the trace is in {tmp_path}/plugins/profile."
        assert said in capsys.readouterr().err
        fit(build(), Profile(str(tmp_path / "next"), 2, 3))
        assert self.recorded(tmp_path / "next")[1] == {2, 3}

    def test_a_run_that_is_broken_off_before_it_says_nothing(self, tmp_path, capsys):
        class Fails(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fit(build(), Profile(str(tmp_path), 10, 100), Fails())
        assert not list(tmp_path.iterdir())
        assert "rofile" not in capsys.readouterr().err

    def test_two_runs_with_one_callback(self, tmp_path):
        profile = Profile(str(tmp_path), 2, 3)
        fit(build(), profile)
        fit(build(), profile)
        assert self.written(tmp_path)

    @pytest.mark.parametrize("limit_bytes", [0, 4096])
    def test_a_trace_that_cannot_be_written(
        self, tmp_path, capsys, file_limit, limit_bytes
    ):
        with file_limit(limit_bytes):
            history = fit(build(), Profile(str(tmp_path), 2, 4), epochs=2)
        assert len(history.history["loss"]) == 2
        said = "towers: The trace could not be written: File too large."
        assert said in capsys.readouterr().err

    def test_nothing_written_is_no_end(self, tmp_path, capsys, monkeypatch):
        stop = tf.profiler.experimental.stop
        monkeypatch.setattr(tf.profiler.experimental, "stop", lambda: stop(save=False))
        fit(build(), Profile(str(tmp_path), 2, 3))
        said = "The trace could not be written: the profiler wrote nothing."
        assert said in capsys.readouterr().err

    def test_rows_of_towers_that_cannot_be_written(
        self, tmp_path, capsys, file_limit, monkeypatch
    ):
        def add(path):
            with file_limit(os.path.getsize(path)):
                add_towers(path)

        monkeypatch.setattr(profile, "add_towers", add)
        fit(build(), Profile(str(tmp_path), 2, 3))
        assert self.recorded(tmp_path)[1] == {2, 3}
        assert "The trace has no rows for the towers: " in capsys.readouterr().err
        assert len(self.written(tmp_path)) == 1

    def test_beside_another_profiler(self, tmp_path, capsys):
        keras_own = keras.callbacks.TensorBoard(
            tmp_path / "keras", profile_batch=(1, 3)
        )
        fit(build(), keras_own, Profile(str(tmp_path / "ours"), 2, 3))
        said = "towers: Nothing is profiled: Another profiler is running."
        assert said in capsys.readouterr().err
        assert not (tmp_path / "ours").exists()

    @pytest.mark.parametrize(("first", "last"), [(5, 2), (0, 3), (5, 5), (1, 201)])
    def test_bad_steps(self, first, last):
        with pytest.raises(ValueError, match=rf"first_step={first} .*2 to 200 steps"):
            Profile("x", first, last)
        Profile("x", 1, 200)

    @pytest.mark.parametrize("builder", [slow("asynchronous"), "parameter_server"])
    def test_looks_a_few_times_only(self, tmp_path, monkeypatch, builder):
        looks = []
        look = Profile._look
        monkeypatch.setattr(
            Profile, "_look", lambda self: (look(self), looks.append(self._done))
        )
        fit(build(), Profile(str(tmp_path), 22, 23), epochs=8, builder=builder)
        assert len(looks) <= 8
        # Asynchronous towers make two steps of a batch, the one that begins with 23.
        expected = {"asynchronous": {23}, "parameter_server": {22, 23}}
        assert self.recorded(tmp_path)[1] == expected[builder]


def _node(tensor):
    return tensor.lstrip("^").partition(":")[0]


class _Number(float):
    """Unlike other numbers, it can be seen to be gone."""


def test_tensors_of_what_was_measured_are_not_kept(tmp_path):
    kept = []

    def measure():
        number = _Number(len(kept))
        kept.append(weakref.ref(number))
        return {"measured": number}

    fit(build(), TensorBoard(str(tmp_path), 1, measures=[measure]))
    assert [number() for number in kept] == 3 * [None]


def test_a_long_name_is_cut_before_it_is_measured(monkeypatch):
    measured = []
    monkeypatch.setattr(pictures, "_length", lambda text: measured.append(text) or 999)
    assert pictures._short("A" * 5000, 120) == "…"
    assert len(measured) <= 122
