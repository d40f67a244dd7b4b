"""Saves a run at the end of each epoch, to be continued."""

import json
import os
import re
from collections.abc import Sequence

import keras
import tensorflow as tf

# Where tf.train.Checkpoint puts the value of its child `about`.
_ABOUT = "about/.ATTRIBUTES/VARIABLE_VALUE"


class Checkpoint(keras.callbacks.Callback):
    """Saves model, optimizer and epoch with `tf.train.CheckpointManager`.

    It writes to new files and only then makes them the latest, so a run that is killed
    while it saves still has its earlier checkpoint. It knows nothing of towers: a run
    may continue on another number of them.

    Attributes:
        epoch: Number of completed epochs: 0 until `restore`.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        model: keras.Model,
        keep: int = 3,
    ):
        """Initializes the callback; writes nothing.

        Args:
            directory: Where the checkpoints lie.
            model: A built and compiled model, with its optimizer built.
            keep: How many checkpoints to keep.
        """
        super().__init__()
        self._directory = os.fspath(directory)
        self._keep = keep
        self._variables = {
            "model": model.variables,
            "optimizer": model.optimizer.variables,
        }
        with tf.device("/device:CPU:0"):
            self._about = tf.Variable("")
        self.epoch = 0

    def _make_checkpoint(self):
        # By position: Keras does not track random seeds as checkpoint children, and
        # names of layers depend on how many were made before. Anew each time: variables
        # may have been moved to another device, which makes others of them.
        return tf.train.Checkpoint(
            about=self._about,
            **{
                part: [v.value for v in variables]
                for part, variables in self._variables.items()
            },
        )

    @property
    def latest(self) -> str | None:
        """The path prefix of the latest checkpoint."""
        return _find_latest(self._directory)

    def restore(self) -> bool:
        """Restores the latest checkpoint into the model.

        Returns:
            Whether there was one.

        Raises:
            ValueError: As for `check_checkpoint`.
        """
        latest = self.latest
        if latest is None:
            return False
        check_checkpoint(self._directory, **self._variables)
        try:
            self._make_checkpoint().restore(latest).assert_consumed()
        except (tf.errors.OpError, IndexError) as error:
            raise _unreadable(latest, error) from error
        self.epoch = _read_about(latest)["epoch"]
        return True

    def on_epoch_end(self, epoch, logs=None):
        """Saves."""
        self.epoch = epoch + 1
        about = {part: _describe(v) for part, v in self._variables.items()}
        self._about.assign(json.dumps({"epoch": self.epoch, **about}))
        manager = tf.train.CheckpointManager(
            self._make_checkpoint(), self._directory, self._keep
        )
        manager.save(checkpoint_number=self.epoch)


def check_checkpoint(
    directory: str | os.PathLike, **parts: Sequence[keras.Variable]
) -> None:
    """Checks that the latest checkpoint, if there is one, is of these variables.

    Args:
        directory: Where the checkpoints lie.
        **parts: Variables of the `model` and of the `optimizer`, or of one of them.

    Raises:
        ValueError: If it is of another model or optimizer, or cannot be read.
    """
    latest = _find_latest(directory)
    if latest is None:
        return
    about = _read_about(latest)
    for part, variables in parts.items():
        found, expected = about[part], _describe(variables)
        if found != expected:
            raise ValueError(
                f"The checkpoint {latest} holds another {part}: "
                f"{_difference(found, expected)}; choose another model_dir, or start "
                "over with --clean."
            )


def _find_latest(directory):
    index = os.path.join(directory, "checkpoint")
    try:
        latest = tf.train.latest_checkpoint(directory)
    except ValueError as error:
        raise _unreadable(index, error) from error
    # TensorFlow only logs what else is wrong, and a run would start over.
    if latest is None and os.path.exists(index):
        raise _unreadable(index, "it names no checkpoint that exists")
    return latest


def _read_about(path):
    try:
        return json.loads(tf.train.load_variable(path, _ABOUT).decode())
    # A short file is an IndexError; another program's value may be no JSON.
    except (tf.errors.OpError, IndexError, ValueError, AttributeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path, reason):
    return ValueError(
        f"Cannot read the checkpoint {path}: {str(reason).splitlines()[0]}; choose "
        "another model_dir, or start over with --clean."
    )


def _describe(variables):
    # Keras numbers names by how many were made before in the process.
    return [[re.sub(r"_\d+", "", v.path), list(v.shape), v.dtype] for v in variables]


def _difference(found, expected):
    for a, b in zip(found, expected, strict=False):
        if a != b:
            return f"it has {_name(a)} where this one has {_name(b)}"
    return f"it has {len(found)} variables where this one has {len(expected)}"


def _name(variable):
    path, shape, dtype = variable
    return f"{path} {shape} {dtype}"
