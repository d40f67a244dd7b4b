"""Arrays of examples, as `train_data` of a file of the user's gives them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.array_files import numpy_files, roles
from towers.input_pipeline.sources.array_files.examples import Examples, sentences
from towers.program.voice import say
from towers.train.outputs.preprocessing import Preprocessing


def load(known: Preprocessing, file: str) -> Any:
    """Reads an array of examples from a file of NumPy's, or a dict of them.

    Raises:
        ValueError: It is no such file.
    """
    try:
        found, _ = numpy_files.load(file)
    except ValueError as error:
        raise ValueError(
            f"{file} has no arrays, and only {known.model} knows how to read the data "
            f"of this run; expected {_wanted(known)}, in a file that numpy.save or "
            "numpy.savez wrote."
        ) from error
    one = "" in found or (not isinstance(known.shape, dict) and len(found) == 1)
    return next(iter(found.values())) if one else found


def examples(known: Preprocessing, file: str) -> Examples:
    """Opens pictures or rows of numbers in a file of NumPy's, and says how.

    Raises:
        ValueError: There are none, or others than the model was trained on.
    """
    arrays, notes = numpy_files.load(file)
    name, array = roles.examples(file, arrays)
    found = Examples(name or file, array)
    if name and len(arrays) > 1:
        notes.append(f"{file}: predictions are for {name!r}.")
    for note in (*notes, *sentences([found])):
        say(note)
    if found.shape != tuple(known.shape):
        raise ValueError(
            f"{file} has examples {[*found.shape]}; expected {[*known.shape]}, as the "
            "model was trained on."
        )
    return found


def checked(known: Preprocessing, examples: Any) -> Any:
    """Makes tensors of arrays, of the type that the run's data had.

    Raises:
        ValueError: They are not such as the model was trained on.
    """
    shapes, dtypes = known.shape, known.dtype
    if not isinstance(shapes, Mapping):
        if hasattr(examples, "keys") or not _is_shape(shapes):
            raise _unexpected(known, examples)
        return _tensor(known, examples, shapes, dtypes)
    if not hasattr(examples, "keys") or not shapes.keys() <= {*examples.keys()}:
        raise _unexpected(known, examples)
    found = {
        name: _tensor(known, examples[name], shape, dtypes[name])
        for name, shape in shapes.items()
    }
    if len({len(each) for each in found.values()}) > 1:
        raise _unexpected(known, examples)
    return found


def specs(known: Preprocessing) -> Any:
    """Returns what `checked` returns, as `tf.TensorSpec`s by name.

    Raises:
        ValueError: Inputs have no names.
    """

    def spec(name, shape, dtype):
        return tf.TensorSpec([None, *shape], dtype, name)

    shapes, dtypes = known.shape, known.dtype
    if isinstance(shapes, Mapping):
        return {name: spec(name, shapes[name], dtypes[name]) for name in shapes}
    if not _is_shape(shapes):
        raise _unexpected(known, None)
    return spec("x", shapes, dtypes)


def _tensor(known, examples, shape, dtype):
    array = np.asarray(examples)
    sizes = zip(array.shape[1:], shape, strict=False)
    fits = array.ndim == len(shape) + 1 and all(b in (None, a) for a, b in sizes)
    if dtype == "string":
        fits = fits and array.dtype.kind in "SOU"
    else:
        fits = fits and np.can_cast(array.dtype, np.dtype(dtype), "same_kind")
    if not fits:
        raise _unexpected(known, examples)
    return tf.constant(array, dtype)


def _is_shape(shape):
    return all(size is None or isinstance(size, int) for size in shape)


def _unexpected(known, examples):
    if not isinstance(known.shape, Mapping) and not _is_shape(known.shape):
        return ValueError(
            f"train_data of {known.model} gives several inputs without names; expected "
            "an array or a dict of them, so train on a dict, or load model.keras by "
            "Keras."
        )
    if hasattr(examples, "keys"):
        found = ", ".join(f"{k} {_text(np.asarray(examples[k]))}" for k in examples)
    else:
        found = _text(np.asarray(examples))
    return ValueError(f"Received {found or 'nothing'}; expected {_wanted(known)}.")


def _wanted(known):
    """Says what arrays are expected."""
    shapes, dtypes = known.shape, known.dtype
    if not isinstance(shapes, Mapping):
        return f"an array {_of(shapes, dtypes)}, as train_data gives x"
    listed = ", ".join(f"{name} {_of(shapes[name], dtypes[name])}" for name in shapes)
    return f"arrays by name, {listed}, as train_data gives x"


def _of(shape, dtype):
    return f"[{', '.join(['B', *map(str, shape)])}] of {dtype}"


def _text(array):
    return f"[{', '.join(map(str, array.shape))}] of {array.dtype}"
