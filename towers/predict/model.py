"""The model of a run: as its end has saved it, or as its newest checkpoint has it."""

import os
import zipfile

import keras

from towers.lifecycle.checkpoints import saved_model, store
from towers.predict.arguments import FILES
from towers.program import small_file
from towers.program.voice import say
from towers.train.settings import ARCHITECTURE

# What Keras calls an optimizer's average of a variable, behind the variable's name.
_AVERAGE = "_average"


def read(model_dir: str, checkpoint: str) -> keras.Model:
    """Reads the model of a run. A line says so if the run has not ended.

    Args:
        model_dir: Of the run.
        checkpoint: "last" or "best".

    Raises:
        ValueError: It is not there, or cannot be loaded.
    """
    path = os.path.join(model_dir, FILES[checkpoint])
    newest = store.find(os.path.join(model_dir, "checkpoints"))[:1]
    if checkpoint == "last" and newest and not _has_ended(model_dir, newest[0]):
        path, load = newest[0], _of_checkpoint
    else:
        load = _of_end
        _check(path)
    try:
        return load(path, model_dir)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(
            f"Cannot load {path}: {' '.join(str(error).split())}; expected a model of "
            "Keras's layers, or of classes in a file that --model names (in Python, "
            "model)."
        ) from error


def _has_ended(model_dir, newest):
    """Tells whether model.keras is of the newest checkpoint, wherever it is now."""
    try:
        path = os.path.join(model_dir, "summary.json")
        saved = small_file.read_json(path, dict).get("checkpoint")
    except (FileNotFoundError, small_file.FileError):
        return False
    return isinstance(saved, str) and os.path.basename(saved) == os.path.basename(
        newest
    )


def _of_end(path, _):
    return keras.saving.load_model(path, compile=False)


def _check(path):
    """Finds damage, of which Keras says that the file is not there, or nothing good."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no file; expected the file that the run wrote.")
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip() is not None
    except FileNotFoundError:
        return
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        damaged = True
    if damaged:
        raise ValueError(
            f"{path} is damaged; expected the file as the run wrote it, so copy it "
            "again, or train again."
        )


def _of_checkpoint(_, model_dir):
    """The model as the newest good checkpoint has it; with --ema, its averages."""
    architecture = small_file.read_json(os.path.join(model_dir, ARCHITECTURE), dict)
    model = keras.saving.deserialize_keras_object(architecture)
    folder = os.path.join(model_dir, "checkpoints")
    path, found = saved_model.newest_good(folder, store.load, model)
    for variable, value in zip(model.variables, found.values["model"], strict=True):
        variable.assign(value)
    optimizer, names = found.values["optimizer"], found.about["variables"]["optimizer"]
    said = f"The run has not ended, so this is the model of its checkpoint {path}"
    averages = [i for i, (name, *_) in enumerate(names) if name.endswith(_AVERAGE)]
    if averages:
        said += ", with the averages of its weights"
        for variable, i in zip(model.trainable_variables, averages, strict=True):
            variable.assign(optimizer[i])
    say(f"{said}.")
    return model
