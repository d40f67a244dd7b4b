"""What a model begins with, and which of its layers stay as they are.

Weights are matched in the file: Keras numbers layers by how many were made before, and
`load_weights` does not say what it left out. What fits is copied into a file of the new
model, which Keras then loads.
"""

import fnmatch
import math
import os
import tempfile
import zipfile
from collections.abc import Sequence

import h5py
import keras

from towers import models
from towers.keras_adapter.layers import layers_of
from towers.keras_adapter.variables import SavedVariable, saved_variables
from towers.program import words
from towers.train.settings import Settings

# As many are named as fit a line or two.
_NAMED = 3


def prepare(settings: Settings, model: keras.Model, goes_on: bool) -> list[str]:
    """Gives a model its first weights, unless its run goes on, and freezes layers.

    Returns:
        What was done.

    Raises:
        ValueError: The weights or the layers are not there.
    """
    notes = []
    if settings.init_weights is not None and not (goes_on or settings.eval_only):
        notes.append(init_weights(settings, model))
    if settings.freeze is not None:
        notes.append(freeze(settings, model))
    return notes


def init_weights(settings: Settings, model: keras.Model) -> str:
    """Gives a model the weights that --init_weights names, as far as they fit.

    A variable fits if its layer has the same place or name, and it has the same shape.

    Returns:
        What was loaded, and what was not.

    Raises:
        ValueError: There are none to be read, or none fits.
    """
    asked = settings.init_weights
    with tempfile.TemporaryDirectory() as folder:
        theirs = os.path.join(folder, "theirs.weights.h5")
        if asked == "imagenet":
            _download(settings.model, model.input_shape[1:], theirs)
        else:
            theirs = settings.weights_file
        found = _read(theirs, asked)
        ours = os.path.join(folder, "ours.weights.h5")
        model.save_weights(ours)
        missing, parameters = _copy(found, ours)
        model.load_weights(ours)
    return _loaded(asked, missing, parameters)


def _download(name, input_shape, path):
    try:
        network = models.imagenet_weights(name, input_shape)
    except Exception as error:  # Keras raises it as it is, of any class
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"Cannot download the ImageNet weights of {name} ({reason}); expected a "
            "network connection, or the file of a model, as --init_weights=PATH."
        ) from error
    network.save_weights(path)


def _read(path, asked):
    """All variables of a file, by what tells their layer, with their values."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                file = archive.open("model.weights.h5")
                with file, h5py.File(file) as weights:
                    return _values(weights)
        with h5py.File(path) as weights:
            return _values(weights)
    except (OSError, KeyError) as error:
        raise ValueError(
            f"Cannot read the weights of --init_weights={asked}: {path} is no file of "
            f"Keras 3 ({error}); expected a .keras or a .weights.h5 file that it has "
            "saved."
        ) from error


def _values(file):
    return {each.key: file[each.path][()] for each in saved_variables(file)}


def _copy(found, ours):
    """Writes what fits to a file of the model's weights.

    Returns:
        What was not found there, by name; and how many parameters there are, by whether
        they were found.
    """
    missing: list[tuple[SavedVariable, tuple | None]] = []
    parameters = {True: [], False: []}
    with h5py.File(ours, "r+") as file:
        for each in saved_variables(file):
            variable, value = file[each.path], found.get(each.key)
            fits = value is not None and value.shape == variable.shape
            parameters[fits].append(variable.size)
            if fits:
                variable[...] = value
            else:
                shape = None if value is None else value.shape
                missing.append((f"{each.layer} {variable.shape}", shape))
    return missing, parameters


def _loaded(asked, missing, parameters):
    loaded, count = len(parameters[True]), sum(map(len, parameters.values()))
    said = [
        f"{name} (not there)" if shape is None else f"{name} (there {shape})"
        for name, shape in missing[:_NAMED]
    ]
    if len(missing) > _NAMED:
        said.append(f"{len(missing) - _NAMED} more")
    if not loaded:
        raise ValueError(
            f"Nothing of --init_weights={asked} fits the model, by name and shape of "
            f"its layers: {', '.join(said)}; expected the weights of a similar model."
        )
    size, whole = sum(parameters[True]), sum(map(sum, parameters.values()))
    line = f"Initial weights of {asked}: {loaded} of {words.count(count, 'variable')}"
    line += f" loaded ({size:,} of {whole:,} parameters)"
    return f"{line}; not loaded: {', '.join(said)}." if said else f"{line}."


def freeze(settings: Settings, model: keras.Model) -> str:
    """Has the layers that --freeze names stay as they are.

    Returns:
        Which they are.

    Raises:
        ValueError: There are none, or no layer would be left to train.
    """
    layers = [each for each in layers_of(model, include_self=False) if each.variables]
    before = _count(model.trainable_variables)
    chosen = _chosen(settings, layers, model)
    for layer in chosen:
        layer.trainable = False
    left = _count(model.trainable_variables)
    if not left:
        raise ValueError(
            f"Received {settings.as_flag('freeze')}, after which the model "
            f"{settings.model} has nothing left to train; expected fewer layers."
        )
    names = [layer.name for layer in chosen]
    named = ", ".join(names[:_NAMED])
    if len(names) > _NAMED:
        named = f"{named}, ... {names[-1]}"
    return (
        f"Frozen: {words.count(len(names), 'layer')} with {before - left:,} of "
        f"{before:,} trainable parameters: {named}."
    )


def _chosen(settings, layers, model):
    patterns, chosen = settings.freeze, {}
    if settings.frozen_layers is not None:
        own = [layer for layer in model.layers if layer.variables]
        if settings.frozen_layers > len(own):
            raise ValueError(
                f"Received {settings.as_flag('freeze')}, but the model "
                f"{settings.model} has {words.count(len(own), 'layer')} with weights; "
                "expected fewer than that."
            )
        return own[: settings.frozen_layers]
    for pattern in patterns:
        found = [each for each in layers if fnmatch.fnmatchcase(each.name, pattern)]
        if not found:
            names = ", ".join(each.name for each in layers)
            raise ValueError(
                f"Received --freeze={pattern}, but no layer with weights of the model "
                f"{settings.model} has such a name; expected some of {names}."
            )
        chosen |= {id(each): each for each in found}
    return [each for each in layers if id(each) in chosen]


def _count(variables: Sequence[keras.Variable]) -> int:
    return sum(math.prod(each.shape) for each in variables)
