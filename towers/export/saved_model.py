"""A SavedModel of a trained model, with all that it needs in its graph."""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from towers.lifecycle.checkpoints.store import reason
from towers.predict import arrays
from towers.predict.trained import Trained, by_name
from towers.program import object_store, whole_file
from towers.train.outputs.preprocessing import OWN
from towers.train.parts.task import all_names


def write(trained: Trained, folder: str) -> tuple[dict[str, list[str]], list[str]]:
    """Writes a SavedModel that plain TensorFlow loads and calls.

    Args:
        trained: The model.
        folder: Where to.

    Returns:
        Names of what it takes, for each signature, and of what it returns.

    Raises:
        ValueError: There is no signature for what the model takes, or the folder cannot
            be written.
    """
    archive = keras.export.ExportArchive()
    archive.track(trained.model)
    takes = _takes(trained)
    function = tf.function(_serve(trained), input_signature=[takes], autograph=False)
    archive.add_endpoint("serve", function)
    names = {"serve": [*takes] if isinstance(takes, dict) else [takes.name]}
    if trained.preprocessing.input in ("row", "columns"):
        specs = _column_specs(trained.preprocessing)
        archive.add_endpoint("serve_columns", _serve_columns(trained, specs))
        names["serve_columns"] = [spec.name for spec in specs]
    try:
        _write(archive, folder)
    except (OSError, tf.errors.OpError) as error:
        fault = error.strerror if isinstance(error, OSError) else reason(error)
        raise ValueError(
            f"Cannot write {folder}: {fault}; choose another OUTPUT."
        ) from error
    outputs = function.get_concrete_function().structured_outputs
    return names, [*outputs]


def _write(archive, folder):
    """Writes a folder that is whole; what else is in there already stays."""
    if "://" in folder:
        object_store.prepare(folder)
        archive.write_out(folder, verbose=False)
        return
    folder = os.path.abspath(folder)
    unfinished = whole_file.unfinished_name(folder)
    try:
        archive.write_out(unfinished, verbose=False)
        whole_file.flush_all(unfinished)
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(unfinished):
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                whole_file.remove(path)
            os.replace(os.path.join(unfinished, name), path)
        whole_file.flush(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _takes(trained):
    """What the signature takes: bytes of pictures, rows, texts, or arrays."""
    known = trained.preprocessing
    if known.input == OWN:
        return arrays.specs(known)
    if known.task == "language_model":
        # The tokens that come next are told one after another, so the caller has ids.
        return tf.TensorSpec([None, *known.shape], tf.int32, name="tokens")
    if known.input == "row":
        return tf.TensorSpec([None, *known.shape], tf.float64, name="rows")
    if known.input == "columns":
        return tf.TensorSpec([None, len(known.columns)], tf.string, name="rows")
    of_text = known.input == "tokens" and trained.tokenizer is not None
    if of_text and not trained.tokenizer.in_graph:
        raise ValueError(
            "Received a run with --tokenizer=hf:FILE, which runs outside of "
            "TensorFlow's graph, so that no SavedModel can hold it; expected a run "
            "with another tokenizer, so use towers predict, or the export() of Keras, "
            "which takes tokens."
        )
    name = {"image": "pictures", "tokens": "texts"}[known.input]
    return tf.TensorSpec([None], tf.string, name=name)


def _column_specs(known):
    """What takes each column by its name, as far as a signature allows that name."""
    specs = []
    for name in known.columns:
        written = re.sub(r"\W", "_", name, flags=re.ASCII)
        written = re.sub(r"^(?![A-Za-z])", "arg_", written)
        while written in ("self", *(spec.name for spec in specs)):
            written += "_"
        specs.append(tf.TensorSpec([None], _dtype(known, name), name=written))
    return specs


def _serve_columns(trained, specs):
    def serve(*columns):
        names = trained.preprocessing.columns
        return _predict(trained, dict(zip(names, columns, strict=True)))

    return tf.function(serve, input_signature=specs, autograph=False)


def _dtype(known, column):
    if known.is_text(column):
        return tf.string
    return tf.int64 if column in known.tables else tf.float64


def _serve(trained: Trained) -> Callable[[Any], Mapping[str, tf.Tensor]]:
    known = trained.preprocessing

    def serve(raw):
        if known.input == "columns":
            fields = tf.unstack(raw, axis=1)
            raw = {
                name: field if known.is_text(name) else _number(known, name, field)
                for name, field in zip(known.columns, fields, strict=True)
            }
        return _predict(trained, raw)

    return serve


def _number(known, column, texts):
    return tf.strings.to_number(tf.strings.strip(texts), _dtype(known, column))


def _predict(trained, raw):
    """Prepares examples as files have them, and calls the model."""
    if trained.preprocessing.input == "image":
        # Pictures are decoded by the CPU.
        with tf.device("/CPU:0"):
            x = trained.preprocessor(raw)
    elif trained.preprocessing.task == "language_model":
        x = raw
    else:
        x = trained.preprocessor(raw)
    outputs = trained.model(x, training=False)
    told = _outputs(
        trained, tf.nest.map_structure(lambda each: tf.cast(each, tf.float32), outputs)
    )
    known = trained.preprocessing
    if known.task == "tagging" and known.input != OWN:
        # Of padding, nothing is told.
        none = {"class": "", "label": -1}
        for name in none.keys() & told.keys():
            told[name] = tf.where(x != 0, told[name], none[name])
    return told


def _outputs(trained, outputs):
    """What the signature returns: classes and probabilities, where there are some."""
    known = trained.preprocessing
    kind = known.known_task and known.known_task.probability
    if kind is None:
        named = by_name(outputs)
        return {"values": outputs} if [*named] == ["output"] else named
    if known.from_logits:
        outputs = getattr(tf.nn, kind)(outputs)
    if kind == "softmax":
        label = tf.argmax(outputs, axis=-1)
        chosen = {"label": label, "probability": tf.reduce_max(outputs, axis=-1)}
    elif known.task == "binary":
        second = tf.reshape(outputs, [-1])
        label = tf.cast(second >= 0.5, tf.int64)
        outputs = tf.stack([1 - second, second], axis=1)
        chosen = {"label": label, "probability": tf.reduce_max(outputs, axis=-1)}
    else:
        return {"probabilities": outputs}
    if trained.classes and known.known_task.kind in ("class", "tags"):
        names = all_names(trained.classes, outputs.shape[-1])
        chosen["class"] = tf.gather(tf.constant(names), label)
    return {**chosen, "probabilities": outputs}
