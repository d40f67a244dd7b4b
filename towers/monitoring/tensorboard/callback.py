"""Writes a run's logs to TensorBoard."""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import keras
import numpy as np
import tensorflow as tf
from tensorboard.plugins.custom_scalar import layout_pb2, summary
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import summary as hparams_summary

from towers.keras_adapter import runtime
from towers.lifecycle.checkpoints.store import reason
from towers.model import fit_call
from towers.model.fit_call import FitCall, if_broken_off
from towers.monitoring.steps import Interval
from towers.monitoring.tensorboard import pictures
from towers.monitoring.tensorboard.graph import readable
from towers.program.voice import say

# Regular expressions of the tags in each chart. They match from the beginning.
_PAGE = {
    "Is it learning?": {
        "Loss": ["epoch_loss$"],
        "Loss, by batch": ["batch_loss$"],
        "Learning rate": ["batch_learning_rate$"],
    },
    "Is it fast?": {
        "Examples per second": ["examples_per_sec$"],
        "Examples per second, each tower": ["examples_per_sec/tower_.*"],
        "Milliseconds of a step": ["step_ms/(input|copy|compute|reduce|python)$"],
        "Milliseconds that each tower computes": ["step_ms/tower_.*"],
    },
    "Is it starved?": {
        "Share of time waiting for input": ["waiting$"],
        "Milliseconds of a step waiting for input": ["step_ms/input$"],
        "Utilization of devices": ["device/.*/utilization$"],
        "Utilization of devices: median, 10th percentile and minimum of samples": [
            "device/.*/utilization_(median|p10|min)$"
        ],
        "Memory of GPUs in MB": ["device/gpu.*_mb$"],
        "Memory of the process in MB": ["device/cpu.*_mb$"],
    },
}

# Of several hosts.
_OF_HOSTS = {
    "Do hosts wait for one another?": {
        "Milliseconds of a step that each host waits for others": [
            "step_ms/host_.*/waits_for_others"
        ],
        "Milliseconds that each host holds up others": [
            "step_ms/host_.*/holds_up_others"
        ],
        "Milliseconds that each host computes": ["step_ms/host_.*/compute"],
        "Milliseconds of a step, adding over hosts": ["step_ms/(network|hosts)$"],
        "MB of gradients added over hosts per second": ["hosts/mb_per_sec$"],
    },
}
Value = bool | int | float | str

# The dashboard finds metrics only beside the parameters, in the run `train`.
VALIDATION = "hparams/validation_"
# Columns that it shows at first: those that are said to differ, then others by name.
_SHOWN = 5


def layout_summary(
    metrics: Iterable[str] = ("accuracy",), several_hosts: bool = False
) -> bytes:
    """Returns the layout as a summary, to be written as it is.

    The metrics are those of the logs, by name: each gets a chart. With several hosts,
    there are charts of these as well.
    """
    charts = {
        name.replace("_", " ").capitalize(): [f"epoch_{name}$"] for name in metrics
    }
    first, *others = _PAGE.items()
    title, (loss, *learning) = first[0], first[1].items()
    page = {title: dict([loss, *charts.items(), *learning]), **dict(others)}
    page |= _OF_HOSTS if several_hosts else {}
    categories = [
        layout_pb2.Category(
            title=title,
            chart=[
                layout_pb2.Chart(
                    title=name, multiline=layout_pb2.MultilineChartContent(tag=tags)
                )
                for name, tags in charts.items()
            ],
        )
        for title, charts in page.items()
    ]
    return summary.pb(layout_pb2.Layout(category=categories)).SerializeToString()


# Says what TensorBoard's HParams dashboard is to show of a run.


def hparams_summaries(
    log_dir: str, hparams: Mapping[str, Value], metrics: Iterable[str]
) -> list[bytes]:
    """Returns a run's hyper-parameters, and the metrics to show beside them.

    Args:
        log_dir: The run's directory, which tells it from others.
        hparams: Values by name, those to be seen first before the others.
        metrics: Names of the metrics, which are shown beside the loss.

    Returns:
        Summaries, to be written as they are.
    """
    infos = [
        api_pb2.HParamInfo(name=each, differs=place < _SHOWN)
        for place, each in enumerate(hparams)
    ]
    parts = ("train", "epoch_"), ("validation", VALIDATION)
    shown = [
        api_pb2.MetricInfo(
            name=api_pb2.MetricName(tag=f"{prefix}{metric}"),
            display_name=f"{part} {metric}",
        )
        for (part, prefix), metric in itertools.product(parts, ("loss", *metrics))
    ]
    # Of a long name the beginning is seen.
    folder, name = os.path.split(os.path.abspath(log_dir))
    experiment = hparams_summary.experiment_pb(infos, shown)
    session = hparams_summary.session_start_pb(
        dict(hparams), group_name=f"{name} in {folder}"
    )
    return [each.SerializeToString() for each in (experiment, session)]


_NOTHING = MappingProxyType({})


def _while_it_works(write):
    """Makes a method write nothing after a first failure, such as a full disk."""

    @functools.wraps(write)
    def method(self, *args, **kwargs):
        if self._failed:
            return
        try:
            write(self, *args, **kwargs)
        except tf.errors.OpError as error:
            # Errors of the data's, or the model's, operations are raised.
            if "Summary" not in str(error).rpartition("[Op:")[2]:
                raise
            self._failed, self._writers = True, {}
            say(
                "TensorBoard shows nothing of the run from here on, as it could not be "
                f"written: {reason(error).rstrip('.')}."
            )

    return method


@fit_call.changes_no_variable
class TensorBoard(keras.callbacks.Callback):
    """Writes TensorBoard logs of a run, as the runs `train` and `validation`.

    Scalars have the names that Keras's own callback uses, `epoch_*` and `batch_*`. They
    contain Keras's logs and the learning rate. Scalars of batches, of validation and of
    measurements are recorded at the optimizer's step, which continues in a resumed run.
    Epochs count from 1, as Keras prints them.

    This is no subclass of Keras's callback. In Keras 3.15, that one drops the scalars
    of epochs if it has an interval of batches, and it counts calls instead of steps.

    Anything that costs more than a scalar is written at the start, at the end of an
    epoch, or at the end. If a file cannot be written, the callback says so and writes
    no more.
    """

    def __init__(
        self,
        log_dir: str,
        log_steps: int,
        *,
        texts: Mapping[str, str | Callable[[], str]] = _NOTHING,
        scalars: Mapping[str, float | None] = _NOTHING,
        measures: Sequence[Callable[[], Mapping[str, float]]] = (),
        marks: Mapping[str, Callable[[], Sequence[str]]] = _NOTHING,
        hparams: Mapping[str, Value] = _NOTHING,
        histograms: bool = False,
        graph: Callable[[], tf.Graph | None] | None = None,
        examples: tf.data.Dataset | None = None,
        sample: tf.data.Dataset | None = None,
        class_names: Sequence[str] | None = None,
        metrics: Sequence[str] = ("accuracy",),
        timeline: Callable[[], Mapping[str, np.ndarray]] | None = None,
    ):
        """Initializes the callback. It writes nothing yet.

        Args:
            log_dir: Folder for the runs `train` and `validation`.
            log_steps: Steps between two recorded batches.
            texts: Markdown texts by tag, such as the flags. Functions are called at the
                end.
            scalars: Numbers by tag that do not change during the run. None is left out.
            measures: Functions that return what was measured since their last call, by
                tag. They are called at each recorded batch and at the end.
            marks: Functions that return what has happened since their last call, in
                sentences, by tag. Each is written as a text at the step that follows.
            hparams: Hyperparameters by name, for the HParams page. None: no such page.
            histograms: Whether to write histograms of the weights after each epoch.
            graph: Returns the graph of a step, or `None` while it does not exist.
            examples: Batches of (uint8 images [B, H, W, C], labels [B]), as the model
                is trained on them, for pictures. None: no pictures.
            sample: Batches of (inputs of the model, labels), to show mistakes and a
                confusion matrix at the end. None: neither.
            class_names: Names of the classes. By default their numbers.
            metrics: Names of the metrics that are shown beside the loss.
            timeline: Returns what devices did in the last seconds, from 0 to 1, by
                name, to be drawn twice a minute and at the end.

        Raises:
            ValueError: If the number of steps is not positive.
        """
        super().__init__()
        self._log_dir = log_dir
        self._interval = Interval(log_steps)
        self._texts, self._scalars = texts, scalars
        self._measures, self._marks = measures, marks
        self._hparams, self._histograms = hparams, histograms
        self._graph = graph
        self._examples, self._sample = examples, sample
        self._metrics = metrics
        self._timeline = pictures.Timeline(timeline)
        self._classes = pictures.Classes(class_names)
        self._writers, self._failed = {}, False
        # Whether examples have been written already.
        self._has_shown = False

    def _begin(self):
        self._measured_step = self._interval.step
        self._writers, self._failed, self._graph_written = {}, False, False

    def on_train_begin(self, logs=None):
        """Writes the texts, settings and examples that are known at the start."""
        self._interval.begin(self.model)
        self._begin()
        self._write_start()

    @_while_it_works
    def _write_start(self):
        with self._writer("train").as_default(self._interval.step):
            for tag, text in self._texts.items():
                if not callable(text):
                    tf.summary.text(tag, text)
            for tag, value in self._scalars.items():
                if value is not None:
                    tf.summary.scalar(tag, value)
            # For a resumed run, TensorBoard shows the first ones.
            plan = getattr(getattr(self.model, "builder", None), "plan", None)
            several = plan is not None and plan.hosts.count > 1
            summaries = [layout_summary(self._metrics, several)]
            if self._hparams:
                summaries += hparams_summaries(
                    self._log_dir, self._hparams, self._metrics
                )
            for summary in summaries:
                tf.summary.experimental.write_raw_pb(summary)
            if self._examples is not None and not self._has_shown:
                pictures.write_examples(self._examples, self._classes)
                self._has_shown = True

    @_while_it_works
    def on_train_batch_end(self, batch, logs=None):
        """Writes the batch's scalars at the end of an interval, and the graph once."""
        over = self._interval.is_over(self.model)
        for tag, happened in self._marks.items():
            if sentences := happened():
                with self._writer("train").as_default(self._interval.step):
                    tf.summary.text(tag, "\n\n".join(sentences))
        if self._graph is not None and not self._graph_written:
            self._write_graph()
        if over:
            self._write_scalars(
                "train", "batch", self._with_rate(logs), self._interval.step
            )
            self._write_measures()
            with self._writer("train").as_default(self._interval.step):
                self._timeline.write_if_due()
            # An epoch may have millions of steps.
            runtime.forget_scalars()

    @_while_it_works
    def on_test_end(self, logs=None):
        """Writes the results of validation, at the training step."""
        self._write_scalars("validation", "batch", logs, self._interval.step)

    @_while_it_works
    def on_epoch_end(self, epoch, logs=None):
        """Writes the epoch's scalars, and histograms."""
        parts = {"train": {}, "validation": {}}
        for name, value in logs.items():
            run = "validation" if name.startswith("val_") else "train"
            parts[run][name.removeprefix("val_")] = value
        parts["train"] = self._with_rate(parts["train"])
        for run, values in parts.items():
            if values:
                self._write_scalars(run, "epoch", values, epoch + 1)
        with self._writer("train").as_default(epoch + 1):
            if self._hparams:
                for name, value in parts["validation"].items():
                    tf.summary.scalar(f"{VALIDATION}{name}", value)
            if self._histograms:
                for weight in self.model.weights:
                    tf.summary.histogram(f"{weight.path}/histogram", weight.value)
        for writer in self._writers.values():
            writer.flush()

    @_while_it_works
    def on_train_end(self, logs=None):
        """Writes the texts and pictures that are known at the end."""
        if self._measured_step != self._interval.step:
            self._write_measures()
        with self._writer("train").as_default(self._interval.step):
            self._timeline.write()
            for tag, text in self._texts.items():
                if callable(text):
                    tf.summary.text(tag, text())
            if self._sample is not None:
                predict = self.model.predict_on_batch
                mistakes = pictures.find_mistakes(predict, self._sample)
                pictures.write_mistakes(mistakes, self._classes)
        self._close()

    def around_fit(self, call: FitCall) -> contextlib.AbstractContextManager[None]:
        """A context that keeps the written logs if an exception ends `fit`."""
        return if_broken_off(self._close)

    @_while_it_works
    def _close(self):
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _writer(self, run):
        if run not in self._writers:
            path = os.path.join(self._log_dir, run)
            self._writers[run] = tf.summary.create_file_writer(path)
        return self._writers[run]

    def _write_graph(self):
        graph = self._graph()
        if graph is not None:
            self._graph_written = True
            with self._writer("train").as_default(self._interval.step):
                tf.summary.graph(readable(graph.as_graph_def()))

    def _write_scalars(self, run, prefix, values, step):
        with self._writer(run).as_default(step):
            for name, value in values.items():
                tf.summary.scalar(f"{prefix}_{name}", value)

    def _write_measures(self):
        self._measured_step = self._interval.step
        with self._writer("train").as_default(self._interval.step):
            for measure in self._measures:
                for tag, value in measure().items():
                    tf.summary.scalar(tag, value)

    def _with_rate(self, logs):
        return {**logs, "learning_rate": float(self.model.optimizer.learning_rate)}
