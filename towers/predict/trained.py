"""A model that towers.train has trained, with all that it needs to be used."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import input_pipeline
from towers.input_pipeline import text

# With the registry come the layers of its models, which model.keras names.
from towers.models import registry, user_file  # noqa: F401
from towers.predict import arrays, tables
from towers.predict.arguments import FILES
from towers.predict.model import read as read_model
from towers.train.outputs import preprocessing
from towers.train.outputs.preprocessing import OWN, Preprocessing
from towers.train.parts.my_model import MyModel


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model, and what it is given.

    Attributes:
        model: As Keras has saved it: it takes what `prepare` returns.
        preprocessing: What becomes of an example before.
        classes: Their names, if it knows any.
        tokenizer: Of a model of texts.
        own: `preprocess` of the user's file, if there is one: of (x, y, training).
    """

    model: keras.Model
    preprocessing: Preprocessing
    classes: Sequence[str] | None = None
    tokenizer: text.Tokenizer | None = None
    own: Callable[[Any, Any, bool], Any] | None = None

    def prepare(self, examples: Any) -> Any:
        """Makes what the model takes of what files have.

        Args:
            examples: Pictures: uint8 pixels [B, H, W, C], or floats in [-1, 1], or the
                bytes of their files; rows of numbers [B, F]; columns of a table, as a
                dict by their names or a DataFrame; or texts. Of a run on `train_data`,
                arrays as it gives them.

        Raises:
            ValueError: The examples are not as expected, such as pictures of floats
                that are not in [-1, 1].
        """
        return self.prepared(_as_read(self.preprocessing, examples))

    def prepared(self, raw: Any) -> Any:
        """Makes what the model takes, in a graph or not.

        Args:
            raw: A tensor, or a dict of them by the names of columns or inputs. Strings
                are encoded pictures, or texts.

        Raises:
            ValueError: `preprocess` of the user's file fails.
        """
        known, x = self.preprocessing, raw
        if isinstance(raw, Mapping) and known.input != OWN:
            x = known.named(raw)
        elif known.input == "row":
            x = known.rows(raw)
        elif known.input == "tokens":
            x = known.texts(raw, self.tokenizer)
        elif known.input == "image" and raw.dtype == tf.string:
            x = known.pictures(raw)
        if self.own is not None:
            x = self._by_own(x)
        images = known.input == "image" and x.dtype == tf.uint8
        return input_pipeline.normalize(x) if images else x

    def _by_own(self, x):
        try:
            x, _ = self.own(x, None, False)
        except Exception as error:
            raise ValueError(
                f"preprocess of {self.preprocessing.model!r} raised "
                f"{type(error).__name__} ({' '.join(str(error).split())}) when called "
                "with y=None; expected x and y in return, so let it leave y "
                "as it is if y is None."
            ) from error
        return x

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
            return _of_each(outputs)
        names = self.classes or known.outputs
        found = known.known_task.decode(outputs, names, known.from_logits)
        if known.task == "tagging" and known.input != OWN:
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
        ValueError: It is not there, or cannot be loaded.
    """
    if checkpoint not in FILES:
        raise ValueError(
            f"Received checkpoint={checkpoint!r}; expected 'last' or 'best'."
        )
    known = Preprocessing.load(model_dir)
    own = None
    if known.model is not None:
        # It may have layers of its own.
        file = pathlib.Path(known.model)
        mine = MyModel(file, user_file.load(file))
        own = mine.preprocess(**known.known) if known.preprocess else None
    folder = os.path.join(model_dir, preprocessing.TOKENIZER)
    tokenizer = text.load(folder) if os.path.isdir(folder) else None
    model = read_model(model_dir, checkpoint)
    classes = preprocessing.read_classes(model_dir)
    return Trained(model, known, classes, tokenizer, own)


def _as_read(known: Preprocessing, examples: Any) -> Any:
    """Makes tensors of examples, checked, as `Trained.prepared` takes them."""
    if known.input == OWN:
        return arrays.checked(known, examples)
    if known.input in ("row", "columns") and hasattr(examples, "keys"):
        return _columns(known, examples)
    if known.input == "columns":
        raise ValueError(
            f"Received a {type(examples).__name__}, but the model takes the columns "
            f"{', '.join(known.columns)}; expected a dict of these, or a DataFrame."
        )
    examples = np.asarray(examples)
    if known.input == "row":
        return tf.constant(examples, tf.float32)
    if known.input == "tokens" or examples.dtype.kind in "SOU":
        return tf.constant(examples, tf.string)
    if examples.dtype.kind in "ui":
        if examples.min() < 0 or examples.max() > 255:
            raise ValueError(
                f"Received pixels of {examples.min()} to {examples.max()}; expected 0 "
                "to 255."
            )
        return tf.constant(examples, tf.uint8)
    if known.range is not None:
        preprocessing.check_range(examples, known.range)
    return tf.constant(examples, tf.float32)


def _columns(known, examples):
    if missing := [name for name in known.columns if name not in examples.keys()]:
        raise ValueError(
            f"Received the columns {', '.join(map(str, examples.keys()))}; expected "
            f"also {', '.join(missing)}, which the model was trained on."
        )
    found = {}
    for name in known.columns:
        values = np.asarray(examples[name])
        if known.is_text(name):
            found[name] = tf.constant([*map(tables.as_text, values)], tf.string)
        elif name in known.tables:
            ids = values.astype(np.int64)
            size = known.tables[name]
            if ((ids < 0) | (ids >= size)).any():
                raise ValueError(
                    f"The column {name!r} has ids of {ids.min()} to {ids.max()}; "
                    f"expected 0 to {size - 1}, as in training."
                )
            found[name] = tf.constant(ids)
        else:
            found[name] = tf.constant(values, tf.float32)
    return found


def by_name(outputs: Any) -> Mapping[str, Any]:
    """Names the outputs of a model without a task, as far as they have no names."""
    if isinstance(outputs, Mapping):
        return outputs
    if isinstance(outputs, list | tuple):
        return {f"output_{k}": each for k, each in enumerate(outputs, 1)}
    return {"output": outputs}


def _of_each(outputs):
    """For each example, what a model without a task returned, by name."""
    outputs = {name: np.asarray(each) for name, each in by_name(outputs).items()}
    rows = zip(*outputs.values(), strict=True)
    return [dict(zip(outputs, row, strict=True)) for row in rows]
