"""The model of a run: as its end has saved it, or as its newest checkpoint has it."""

import json
import os
import zipfile

import keras

from towers.lifecycle.checkpoints import saved_model, store
from towers.predict.arguments import FILES
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
            "Keras's layers, or of classes in the file of --model."
        ) from error


def _has_ended(model_dir, newest):
    """Whether model.keras is of the newest checkpoint, wherever that lies by now."""
    try:
        with open(os.path.join(model_dir, "summary.json"), encoding="utf-8") as file:
            saved = json.load(file)["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return os.path.basename(saved or "") == os.path.basename(newest)


def _of_end(path, _):
    return keras.saving.load_model(path, compile=False)


def _check(path):
    """Finds damage, of which Keras says that the file is not there, or nothing good."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip() is not None
    except FileNotFoundError:
        return
    except (OSError, zipfile.BadZipFile):
        damaged = True
    if damaged:
        raise ValueError(
            f"{path} is damaged; expected the file as the run wrote it, so copy it "
            "again, or train again."
        )


def _of_checkpoint(_, model_dir):
    """The model as the newest good checkpoint has it; with --ema, its averages."""
    with open(os.path.join(model_dir, ARCHITECTURE), encoding="utf-8") as file:
        model = keras.models.model_from_json(file.read())
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
