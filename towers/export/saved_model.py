"""A SavedModel of a trained model, with all that it needs in its graph."""

import re
from collections.abc import Callable, Mapping

import keras
import tensorflow as tf

from towers.predict.trained import Trained


def write(trained: Trained, folder: str) -> dict[str, list[str]]:
    """Writes a SavedModel that plain TensorFlow loads and calls.

    Args:
        trained: The model.
        folder: Where to.

    Returns:
        Names of what its signature takes, and of what it returns.
    """
    archive = keras.export.ExportArchive()
    archive.track(trained.model)
    takes = _takes(trained)
    function = tf.function(_serve(trained), input_signature=[takes], autograph=False)
    archive.add_endpoint("serve", function)
    if trained.preprocessing.input == "row":
        archive.add_endpoint("serve_columns", _serve_columns(trained, function))
    archive.write_out(folder, verbose=False)
    outputs = function.get_concrete_function().structured_outputs
    return {"takes": [takes.name], "returns": [*outputs]}


def _takes(trained):
    """What the signature takes: the bytes of pictures, rows of numbers, or texts."""
    known = trained.preprocessing
    if known.input == "row":
        return tf.TensorSpec([None, *known.shape], tf.float32, name="rows")
    names = {"image": "pictures", "tokens": "texts"}
    if known.input not in names or known.task == "language_model":
        what = "writes text" if known.input in names else f"takes {known.input}"
        raise ValueError(
            f"This run's model {what}, for which there is no signature yet; expected "
            "one of pictures, rows of numbers or labelled texts, so save model.keras "
            "by its export() in Keras."
        )
    return tf.TensorSpec([None], tf.string, name=names[known.input])


def _serve_columns(trained, serve):
    """Takes each column by its name, as far as that can be a name in Python."""
    specs = [
        tf.TensorSpec([None], tf.float32, name=re.sub(r"\W", "_", name))
        for name in trained.preprocessing.features
    ]
    return tf.function(
        lambda *columns: serve(tf.stack(columns, axis=1)),
        input_signature=specs,
        autograph=False,
    )


def _serve(trained: Trained) -> Callable[[tf.Tensor], Mapping[str, tf.Tensor]]:
    known, model, tokenizer = trained.preprocessing, trained.model, trained.tokenizer

    def serve(raw):
        if known.input == "image":
            # Pictures are decoded by the CPU.
            with tf.device("/CPU:0"):
                x = known.pictures(raw)
        elif known.input == "tokens":
            x = known.texts(raw, tokenizer)
        else:
            x = known.rows(raw)
        outputs = tf.cast(model(x, training=False), tf.float32)
        return _outputs(trained, outputs)

    return serve


def _outputs(trained, outputs):
    """What the signature returns: classes and probabilities, where there are some."""
    known = trained.preprocessing
    kind = known.known_task and known.known_task.probability
    if kind is None:
        return {"values": outputs}
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
        names = tf.constant([*map(str, trained.classes)])
        chosen["class"] = tf.gather(names, label)
    return {**chosen, "probabilities": outputs}
