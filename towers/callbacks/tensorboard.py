"""Writes what a run does to TensorBoard."""

import os
import types
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.builders.asynchronous import Staleness


class TensorBoard(keras.callbacks.Callback):
    """Writes scalars, the graph, texts and pictures, in the runs `train`, `validation`.

    Scalars have the names of Keras's own callback, `epoch_*` and `batch_*`: what is in
    Keras's logs, the learning rate, and each tower's images per second. Batches are at
    the optimizer's step, which goes on counting in a resumed run, and so is validation;
    epochs are at the epoch's number. `towers/staleness_*`, of asynchronous towers, is
    that of the updates since it was last written. (It is no subclass of Keras's
    callback, which with an interval of batches drops the scalars of epochs, in 3.15,
    and counts calls instead of steps.)
    """

    def __init__(
        self,
        log_dir: str,
        every_steps: int,
        fractions: Sequence[float],
        texts: Mapping[str, str],
        scalars: Mapping[str, float | None] = types.MappingProxyType({}),
        sample: tf.data.Dataset | None = None,
        class_names: Sequence[str] | None = None,
        staleness: Staleness | None = None,
    ):
        """Initializes the callback; writes nothing.

        Args:
            log_dir: Where the runs `train` and `validation` are written.
            every_steps: Steps between two recorded batches.
            fractions: The part of a full batch that each tower gets.
            texts: Markdown texts to write, by tag, such as the flags.
            scalars: Numbers that do not change in the run, by tag; None is no number.
            sample: Batches of (uint8 images [B, H, W, C], labels [B]), always in
                the same order, for the pictures. None: no pictures.
            class_names: Names of the classes; their numbers by default.
            staleness: The asynchronous builder's.
        """
        super().__init__()
        self._log_dir = log_dir
        self._every_steps = every_steps
        self._fractions = fractions
        self._texts = texts
        self._scalars = scalars
        self._sample = sample
        self._class_names = class_names
        self._staleness = staleness
        self._writers = {}
        self._step = 0
        self._graph_state = "wanted"

    def on_train_begin(self, logs=None):
        """Writes texts and input pictures."""
        self._step = int(self.model.optimizer.iterations)
        with self._writer("train").as_default(self._step):
            for tag, text in self._texts.items():
                tf.summary.text(tag, text)
            for tag, value in self._scalars.items():
                if value is not None:
                    tf.summary.scalar(tag, value)
            if self._sample is not None:
                images, _ = next(iter(self._sample))
                _write_images("input", images[:9])

    def on_train_batch_begin(self, batch, logs=None):
        """Begins to record the graph, at the first batch."""
        if self._graph_state == "wanted":
            tf.summary.trace_on(graph=True)
            self._graph_state = "recording"

    def on_train_batch_end(self, batch, logs=None):
        """Writes the batch's scalars, if its turn has come."""
        before = self._step
        self._step = int(self.model.optimizer.iterations)
        if self._graph_state == "recording":
            with self._writer("train").as_default(self._step):
                tf.summary.trace_export("step")
            self._graph_state = "written"
        if before // self._every_steps != self._step // self._every_steps:
            self._write_scalars("train", "batch", self._with_rates(logs), self._step)
            self._write_staleness()

    def on_test_end(self, logs=None):
        """Writes the results of validation, at the step they belong to."""
        self._write_scalars("validation", "batch", logs, self._step)

    def on_epoch_end(self, epoch, logs=None):
        """Writes the epoch's scalars."""
        parts = {"train": {}, "validation": {}}
        for name, value in logs.items():
            run = "validation" if name.startswith("val_") else "train"
            parts[run][name.removeprefix("val_")] = value
        parts["train"] = self._with_rates(parts["train"])
        self._write_staleness()
        for run, values in parts.items():
            if values:
                self._write_scalars(run, "epoch", values, epoch)
                self._writer(run).flush()

    def on_train_end(self, logs=None):
        """Writes pictures of what the model gets wrong."""
        if self._sample is not None:
            with self._writer("train").as_default(self._step):
                self._write_mistakes()
        for writer in self._writers.values():
            writer.close()

    def _writer(self, run):
        if run not in self._writers:
            path = os.path.join(self._log_dir, run)
            self._writers[run] = tf.summary.create_file_writer(path)
        return self._writers[run]

    def _write_scalars(self, run, prefix, values, step):
        with self._writer(run).as_default(step):
            for name, value in values.items():
                tf.summary.scalar(f"{prefix}_{name}", value)

    def _write_staleness(self):
        staleness = self._staleness
        if staleness is None or not staleness.updates:
            return
        with self._writer("train").as_default(self._step):
            tf.summary.scalar("towers/staleness_mean", staleness.mean)
            tf.summary.scalar("towers/staleness_max", staleness.maximum)
        staleness.reset()

    def _with_rates(self, logs):
        """Adds the learning rate, and each tower's images per second."""
        rates = {"learning_rate": float(self.model.optimizer.learning_rate)}
        if "images_per_sec" in logs:
            # Towers step together, so each has its share of the images of all.
            for k, fraction in enumerate(self._fractions):
                rates[f"images_per_sec/tower_{k}"] = logs["images_per_sec"] * fraction
        return {**logs, **rates}

    def _write_mistakes(self, most=16):
        pictures, lines = [], []
        for images, labels in self._sample:
            guesses = np.argmax(self.model.predict_on_batch(images), axis=-1)
            for i in np.flatnonzero(guesses != labels.numpy()):
                truth, guess = self._name(labels[i]), self._name(guesses[i])
                pictures.append(images[i])
                lines.append(f"{len(lines) + 1}. {truth}, taken for {guess}")
            if len(pictures) >= most:
                break
        if pictures:
            _write_images("misclassified", tf.stack(pictures[:most]))
            # A tag is of one kind only, so not the pictures' own.
            tf.summary.text("misclassified_as", "\n".join(lines[:most]))

    def _name(self, label):
        return self._class_names[label] if self._class_names else str(int(label))


def _write_images(tag, images):
    tf.summary.image(tag, images, max_outputs=len(images))
