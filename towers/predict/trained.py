"""A model that towers.train has trained, with all that it needs to be used."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.input_pipeline import text

# With the registry come the layers of its models, which model.keras names.
from towers.models import registry, user_file  # noqa: F401
from towers.predict.arguments import FILES
from towers.predict.model import read as read_model
from towers.train.outputs import preprocessing
from towers.train.outputs.preprocessing import Preprocessing


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model, and what it is given.

    Attributes:
        model: As Keras has saved it: it takes what `prepare` returns.
        preprocessing: What becomes of an example before.
        classes: Their names, if it knows any.
        tokenizer: Of a model of texts.
    """

    model: keras.Model
    preprocessing: Preprocessing
    classes: Sequence[str] | None = None
    tokenizer: text.Tokenizer | None = None

    def prepare(self, examples: Any) -> tf.Tensor:
        """Makes what the model takes of what files have.

        Args:
            examples: Pictures: uint8 pixels [B, H, W, C], or floats in [-1, 1], or the
                bytes of their files; rows of numbers [B, F]; or texts.

        Raises:
            ValueError: Pictures of floats are not in [-1, 1].
        """
        known = self.preprocessing
        examples = np.asarray(examples)
        if known.input == "row":
            return known.rows(examples)
        if known.input == "tokens":
            return known.texts(tf.constant(examples, tf.string), self.tokenizer)
        if examples.dtype.kind in "SOU":
            return known.pictures(tf.constant(examples, tf.string))
        if examples.dtype.kind in "ui":
            return tf.cast(examples, tf.float32) / 127.5 - 1
        preprocessing.check_range(examples, known.range)
        return tf.cast(examples, tf.float32)

    def predict(self, examples: Any) -> Sequence[dict[str, Any]]:
        """Predicts for examples as `prepare` takes them; see `decode`."""
        given = self.prepare(examples)
        return self.decode(self.model.predict_on_batch(given), given)

    def decode(self, outputs: Any, given: Any) -> Sequence[dict[str, Any]]:
        """Reads predictions from what the model returned: for each example a dict.

        Args:
            outputs: What the model returned.
            given: For what: of padding, nothing is told.
        """
        known = self.preprocessing
        if known.known_task is None:
            return [{"output": each} for each in np.asarray(outputs)]
        names = self.classes or known.outputs
        found = known.known_task.decode(outputs, names, known.from_logits)
        if known.task == "tagging":
            lengths = np.count_nonzero(given, axis=-1)
            pairs = zip(found, lengths, strict=True)
            found = [{"tags": each["tags"][:length]} for each, length in pairs]
        return found


def load_model(model_dir: str, checkpoint: str = "last") -> Trained:
    """Loads a model that towers.train has trained, with its preprocessing.

    Args:
        model_dir: Of the run.
        checkpoint: "last" for model.keras, or for the newest checkpoint of a run that
            has not ended; "best" for best.keras.

    Raises:
        ValueError: It is not there, cannot be loaded, or only a file of the user's
            knows how examples are prepared.
    """
    if checkpoint not in FILES:
        raise ValueError(
            f"Received checkpoint={checkpoint!r}; expected 'last' or 'best'."
        )
    known = Preprocessing.load(model_dir)
    known.check_known()
    if known.model is not None:
        # It may have layers of its own.
        user_file.load(pathlib.Path(known.model))
    folder = os.path.join(model_dir, preprocessing.TOKENIZER)
    tokenizer = text.load(folder) if os.path.isdir(folder) else None
    return Trained(
        read_model(model_dir, checkpoint),
        known,
        preprocessing.read_classes(model_dir),
        tokenizer,
    )
