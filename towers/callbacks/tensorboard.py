"""Writes what a run does to TensorBoard."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class TensorBoard(keras.callbacks.TensorBoard):
    """Keras's TensorBoard callback, with what a run on towers has besides.

    Keras writes the scalars, as `epoch_*` and `batch_*` in the runs `train` and
    `validation`. This adds: the learning rate of each recorded batch, each tower's
    images per second, the graph of the step with its towers, the flags, input pictures,
    and, at the end, pictures of what the model got wrong. Steps go on counting in a
    resumed run.
    """

    def __init__(
        self,
        log_dir: str,
        every_steps: int,
        fractions: Sequence[float],
        texts: Mapping[str, str],
        sample: tf.data.Dataset | None = None,
        class_names: Sequence[str] | None = None,
    ):
        """Initializes the callback.

        Args:
            log_dir: Where the runs `train` and `validation` are written.
            every_steps: Calls between two recorded batches.
            fractions: The part of a full batch that each tower gets.
            texts: Markdown texts to write, by tag, such as the flags.
            sample: Batches of (images [B, H, W, C] in [-1, 1], labels [B]), always in
                the same order, for the pictures. None: no pictures.
            class_names: Names of the classes; their numbers by default.
        """
        super().__init__(log_dir, write_graph=False, update_freq=every_steps)
        self._fractions = fractions
        self._texts = texts
        self._sample = sample
        self._class_names = class_names
        self._graph_state = "wanted"

    def on_train_begin(self, logs=None):
        """Writes texts and input pictures."""
        super().on_train_begin(logs)
        self._global_train_batch = int(self.model.optimizer.iterations)
        with self._train_writer.as_default():
            for tag, text in self._texts.items():
                tf.summary.text(tag, text, step=self._global_train_batch)
            if self._sample is not None:
                images, _ = next(iter(self._sample))
                self._write_images("input", images[:9])

    def on_train_batch_begin(self, batch, logs=None):
        """Begins to record the graph, at the first batch."""
        super().on_train_batch_begin(batch, logs)
        if self._graph_state == "wanted":
            tf.summary.trace_on(graph=True)
            self._graph_state = "recording"

    def on_train_batch_end(self, batch, logs=None):
        """Writes the batch's scalars, if this batch is recorded."""
        if self._graph_state == "recording":
            with self._train_writer.as_default(), tf.summary.record_if(True):
                tf.summary.trace_export("step", step=self._global_train_batch)
            self._graph_state = "written"
        if self._global_train_batch % self.update_freq == 0:
            logs = self._collect_learning_rate(dict(logs))
            self._write_tower_rates(logs, "batch", self._global_train_batch)
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        """Writes the epoch's scalars."""
        super().on_epoch_end(epoch, logs)
        self._write_tower_rates(logs, "epoch", epoch)

    def on_train_end(self, logs=None):
        """Writes pictures of what the model gets wrong."""
        if self._sample is not None:
            with self._train_writer.as_default():
                self._write_mistakes()
        super().on_train_end(logs)

    def _write_tower_rates(self, logs: dict[str, Any], prefix: str, step: int):
        # Towers step together, so each has its share of the images of all.
        rate = logs.get("images_per_sec")
        if rate is None:
            return
        with self._train_writer.as_default():
            for k, fraction in enumerate(self._fractions):
                tf.summary.scalar(
                    f"{prefix}_images_per_sec/tower_{k}", rate * fraction, step=step
                )

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
            self._write_images("misclassified", tf.stack(pictures[:most]))
            text = "\n".join(lines[:most])
            tf.summary.text("misclassified", text, step=self._global_train_batch)

    def _write_images(self, tag, images):
        tf.summary.image(
            tag,
            tf.cast(images, tf.float32) / 2 + 0.5,
            step=self._global_train_batch,
            max_outputs=len(images),
        )

    def _name(self, label):
        return self._class_names[label] if self._class_names else str(int(label))
