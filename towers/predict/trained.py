"""A model that towers.train has trained, with all that it needs to be used."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from towers.input_pipeline import text

# With the registry come the layers of its models, which model.keras names.
from towers.models import registry, spec, user_file  # noqa: F401
from towers.predict.arguments import FILES
from towers.predict.examples import as_tensors
from towers.predict.model import read as read_model
from towers.predict.preprocessor import Preprocessor
from towers.train.outputs.preprocessing import (
    CLASSES,
    OWN,
    TOKENIZER,
    Preprocessing,
    read_classes,
)
from towers.train.parts.my_model import MyModel

# What is predicted by tasks whose runs write classes.json.
_OF_CLASSES = ("class", "tags", "labels", "mask")


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model, and what it is given.

    Attributes:
        model: As Keras has saved it: it takes what `prepare` returns.
        preprocessing: What it is given, and what it returns.
        preprocessor: Prepares tensors as training did.
        classes: Their names, if it knows any.
        tokenizer: Of a model of texts.
    """

    model: keras.Model
    preprocessing: Preprocessing
    preprocessor: Preprocessor
    classes: Sequence[str] | None = None
    tokenizer: text.Tokenizer | None = None

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
        return self.preprocessor(as_tensors(self.preprocessing, examples))

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


def load_model(
    model_dir: str, checkpoint: str = "last", model: str | None = None
) -> Trained:
    """Loads a model that towers.train has trained, with its preprocessing.

    A model_dir is data, which may come from anybody. No code runs that it names, but
    only that of `model`.

    Args:
        model_dir: Of the run.
        checkpoint: "last" for model.keras, or for the newest checkpoint of a run that
            has not ended; "best" for best.keras.
        model: The Python file of the run's --model, which is run. It is needed if it
            defines `preprocess`, or classes of the model.

    Raises:
        ValueError: It is not there, or cannot be loaded.
    """
    if checkpoint not in FILES:
        raise ValueError(
            f"Received checkpoint={checkpoint!r}; expected 'last' or 'best'."
        )
    known = Preprocessing.load(model_dir)
    own = None
    if model is not None:
        # It may have layers of its own.
        file, _ = spec.split_user_file(model)
        mine = MyModel(file, user_file.load(file))
        own = mine.preprocess(**known.known) if known.preprocess else None
    elif known.preprocess:
        raise ValueError(
            f"The run in {model_dir} needs preprocess of {known.model}, and no code "
            "runs that only a run names; read that file, and name it by --model (in "
            "Python, model)."
        )
    folder = os.path.join(model_dir, TOKENIZER)
    tokenizer = text.load(folder) if os.path.isdir(folder) else None
    classes = read_classes(model_dir)
    trained = read_model(model_dir, checkpoint)
    _check_whole(model_dir, known, classes, tokenizer)
    preprocessor = Preprocessor(known, tokenizer, own)
    return Trained(trained, known, preprocessor, classes, tokenizer)


def _check_whole(model_dir, known, classes, tokenizer):
    """Checks that nothing is missing that the run has written."""
    of_classes = known.known_task and known.known_task.kind in _OF_CLASSES
    missing = {
        # Only who wrote train_data knows the names of its classes.
        CLASSES: of_classes and classes is None and known.input != OWN,
        TOKENIZER: known.input == "tokens" and tokenizer is None,
    }
    for name in filter(missing.get, missing):
        raise ValueError(
            f"{model_dir} has no {name}; expected all that the run wrote, so copy it "
            "again, or train again."
        )


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
