"""Names to models: the one list of what can be trained by name.

A name is one of this project's own families, a network of `keras.applications`
(in any case), or `file.py:function` for a function of the user's own. All but
the last take pixels in [-1, 1] and return float32 logits [batch, num_classes].

Nothing here knows of devices. Data, losses and optimizers are for whoever calls,
and so is the check that a user's own model has `num_classes` outputs.
"""

import contextlib
import functools
import importlib.util
import numbers
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import keras
import numpy as np

from towers.models import applications, cnn, lstm, mlp, resnet_cifar, spec

Builder = Callable[[tuple[int, ...], int], keras.Model]

_OWN: dict[str, Builder] = {
    "cnn": cnn.build,
    "lstm": lstm.build,
    "mlp": mlp.build,
    **{
        f"resnet{depth}": functools.partial(resnet_cifar.build, depth=depth)
        for depth in resnet_cifar.DEPTHS
    },
}

# The only ones that do not need images.
_ANY_RANK = ("mlp",)


def build(
    name: str,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    seed: int | None = None,
) -> keras.Model:
    """Builds a model by name.

    Args:
        name: A name from `spec.names()`, in any case, or `file.py:function`, where
            `function(input_shape, num_classes)` returns a Keras model.
        input_shape: Shape of one example, without the batch: (height, width,
            channels) for images.
        num_classes: Number of logits.
        seed: Makes the first weights and the dropout reproducible. The caller's
            own random state is left as it was. None draws from that state.

    Returns:
        A model from [batch, *input_shape] to float32 logits [batch, num_classes];
        a model from the user's own file is returned as it is.

    Raises:
        ValueError: If the name, the shape or the number of classes is wrong, or
            the user's file or function fails.
    """
    spec.check(name)
    shape = _checked_shape(input_shape)
    if not _is_count(num_classes):
        raise ValueError(
            f"num_classes must be a whole number of at least 1, but {num_classes!r} "
            "was received; give the number of classes of the data."
        )
    with _seeded(seed):
        return _builder(name, shape)(shape, int(num_classes))


def _builder(name: str, shape: tuple[int, ...]) -> Builder:
    if spec.is_user_file(name):
        return functools.partial(_build_user_model, *spec.split_user_file(name))
    name = spec.canonical(name)
    if len(shape) != 3 and name not in _ANY_RANK:
        raise ValueError(
            f"The model {name!r} needs images of shape (height, width, channels), but "
            f"input_shape={shape} was received; use mlp for data that are not images."
        )
    return _OWN.get(name) or functools.partial(applications.build, name)


def _is_count(value: object) -> bool:
    return (
        isinstance(value, numbers.Integral)
        and not isinstance(value, bool)
        and value >= 1
    )


def _checked_shape(input_shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(input_shape) if isinstance(input_shape, Sequence) else ()
    if not sizes or not all(_is_count(size) for size in sizes):
        raise ValueError(
            f"input_shape must hold whole numbers of at least 1, but {input_shape!r} "
            "was received; give the shape of one example without the batch, such as "
            "(32, 32, 3)."
        )
    return tuple(int(size) for size in sizes)


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seeds what Keras draws its seeds from, and puts it back afterwards.

    Keras 3 draws the seed of each initializer and each dropout layer from
    Python's `random`; NumPy is for users' functions.
    """
    if seed is None:
        yield
        return
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


# file.py:function


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__} ({' '.join(str(error).split())})"


def _build_user_model(
    path: Path, function: str, input_shape: tuple[int, ...], num_classes: int
) -> keras.Model:
    module = _load(path)
    build_model = getattr(module, function, None)
    if not callable(build_model):
        raise spec.no_such_function(
            path, function, {k for k, v in vars(module).items() if callable(v)}
        )
    try:
        model = build_model(input_shape, num_classes)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"The function {function!r} of {str(path)!r} raised "
            f"{_one_line(error)} when called with input_shape="
            f"{input_shape} and num_classes={num_classes}; correct the function."
        ) from error
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"The function {function!r} of {str(path)!r} returned "
            f"{type(model).__name__}, not a keras.Model; return the model."
        )
    return model


def _make_importable(folder: str) -> None:
    """Lets a user's file import what lies beside it, as Python does for a script.

    Such folders come behind what is installed, which they must not hide, and before the
    current directory where that comes last (see `startup.begin`).
    """
    if folder in sys.path:
        return
    last = len(sys.path) - (sys.path[-1:] == [os.getcwd()])
    sys.path.insert(last, folder)


def _load(path: Path) -> object:
    """Runs the user's file as a module of its own."""
    _make_importable(str(path.absolute().parent))
    spec = importlib.util.spec_from_file_location(f"user_model_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a class's module up here.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ValueError(
            f"The file {str(path)!r} raised {_one_line(error)} when loaded; "
            "correct the file."
        ) from error
    return module
