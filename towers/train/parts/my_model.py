"""A file of the user's, --model=file.py, and what it defines beside the model.

Its syntax tells which names it defines, before it runs and touches devices. A function
of the user's is called if all that it needs is known by its parameters' names; another
one is the value itself.
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from towers.models import spec, user_file
from towers.train.settings import OWN_NAMES, Settings

# What Keras says of a loss, metrics or data it cannot take.
_LOSS = "a loss of Keras, its name, a function of (y_true, y_pred), or a list or dict"
_METRICS = "a list of metrics of Keras, their names or functions, or a dict of those"
_PREPROCESS = "a function of (x, y) or of (x, y, training) that returns x and y"
_DATA = (
    "a tf.data.Dataset in batches, a keras.utils.PyDataset, or arrays (x, y) or "
    "(x, y, sample_weight)"
)


@dataclasses.dataclass(frozen=True)
class MyModel:
    """A file of the user's.

    Attributes:
        path: Of the file.
        module: What running it made; it is run once in a job.
    """

    path: Path
    module: types.ModuleType

    def __contains__(self, name: str) -> bool:
        found = getattr(self.module, name, None)
        # `from keras import losses, metrics` defines no metrics.
        return found is not None and not inspect.ismodule(found)

    def value(self, name: str, **known: Any) -> Any:
        """Returns what a name stands for; `None` if the file does not define it.

        A function is called, if it asks for nothing but what is known.

        Args:
            name: The name.
            **known: What it may ask for, by the names of its parameters.

        Raises:
            ValueError: The function fails.
        """
        if name not in self:
            return None
        found = getattr(self.module, name)
        if not inspect.isfunction(found):
            return found
        asked = inspect.signature(found).parameters.values()
        needed = [each.name for each in asked if each.default is each.empty]
        if not {*needed} <= known.keys():
            return found
        given = {each.name: known[each.name] for each in asked if each.name in known}
        try:
            return found(**given)
        except (Exception, SystemExit) as error:
            raised = user_file.one_line(error, self.path)
            raise ValueError(
                f"The function {name!r} of {str(self.path)!r} raised {raised}; correct "
                "the function."
            ) from error

    def asks(self, name: str, parameter: str) -> bool:
        """Tells whether a function of the file asks for something, by its name."""
        found = getattr(self.module, name)
        asked = inspect.signature(found).parameters if inspect.isfunction(found) else ()
        return parameter in asked

    # What the file may define. Each is `None` if it does not.

    def loss(self, **known: Any) -> Any:
        """Returns what `compile` takes as loss; see `value`."""
        found = self.value("loss", **known)
        self._check("loss", found, _is_function, _LOSS)
        return _resolved(found, keras.losses.get, self._bad("loss", found, _LOSS))

    def metrics(self, **known: Any) -> Any:
        """Returns what `compile` takes as metrics; see `value`."""
        found = self.value("metrics", **known)
        if found is not None and not isinstance(found, list | tuple | dict):
            raise self._bad("metrics", found, _METRICS)
        self._check("metrics", found, _is_function, _METRICS)
        error = self._bad("metrics", found, _METRICS)
        return _resolved(found, _metric, error)

    def optimizer(self, **known: Any) -> keras.optimizers.Optimizer | None:
        """Returns the optimizer; see `value`."""
        found, expected = self.value("optimizer", **known), "an optimizer of Keras"
        if found is not None and not isinstance(found, keras.optimizers.Optimizer):
            raise self._bad("optimizer", found, expected)
        return found

    def callbacks(self, **known: Any) -> list[keras.callbacks.Callback]:
        """Returns the callbacks, none if there are none; see `value`."""
        found = self.value("callbacks", **known)
        listed = [] if found is None else found
        listed = listed if isinstance(listed, list | tuple) else [listed]
        if not all(isinstance(each, keras.callbacks.Callback) for each in listed):
            raise self._bad("callbacks", found, "a list of callbacks of Keras")
        return [*listed]

    def preprocess(self, **known: Any) -> Callable[[Any, Any, bool], Any] | None:
        """Returns a function of (x, y, training), or `None`; see `value`."""
        found = self.value("preprocess", **known)
        if found is None:
            return None
        if not callable(found) or isinstance(found, type):
            raise self._bad("preprocess", found, _PREPROCESS)
        arguments = inspect.signature(found).parameters.values()
        count = sum(
            each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
            for each in arguments
        )
        if count not in (2, 3):
            raise self._bad("preprocess", found, _PREPROCESS)
        return found if count == 3 else lambda x, y, training: found(x, y)

    def data(self, name: str, **known: Any) -> Any:
        """Returns `train_data` or `eval_data`, whichever is named; see `value`."""
        found = self.value(name, **known)
        if found is None:
            return None
        kinds = tf.data.Dataset, keras.utils.PyDataset
        if isinstance(found, kinds):
            return found
        if isinstance(found, tuple | list) and len(found) in (2, 3):
            leaves = keras.tree.flatten(tuple(found))
            if leaves and all(getattr(each, "shape", ()) != () for each in leaves):
                return tuple(found)
        raise self._bad(name, found, _DATA)

    def _check(
        self, name: str, found: Any, fits: Callable[[Any], bool], expected: str
    ) -> None:
        for each in keras.tree.flatten(found):
            if not (each is None or isinstance(each, str) or fits(each)):
                raise self._bad(name, each, expected)

    def _bad(self, name: str, found: Any, expected: str) -> ValueError:
        return ValueError(
            f"{name} of {str(self.path)!r} is {_described(found)}; expected "
            f"{expected}, or a function that returns it, so correct {name}."
        )


def load(settings: Settings) -> MyModel | None:
    """Runs the file that --model names; `None` for a model by name.

    Raises:
        ValueError: It fails, or brings what counts by a star, so that it was not seen.
    """
    if not spec.is_user_file(settings.model):
        return None
    path, _ = spec.split_user_file(settings.model)
    mine = MyModel(path, user_file.load(path))
    seen = spec.names_in(path)
    if hidden := [name for name in OWN_NAMES if name in mine and name not in seen]:
        raise ValueError(
            f"The file {str(path)!r} brings {', '.join(hidden)} by `import *`, which "
            "is not seen before the file is run; import each by its name."
        )
    return mine


def _is_function(value):
    return callable(value) and not isinstance(value, type)


def _resolved(found, get, error):
    """Checks what is given by its name; leaves all as it is."""
    for each in keras.tree.flatten(found):
        if isinstance(each, str):
            try:
                get(each)
            except ValueError:
                raise error from None
    return found


def _metric(name):
    # Keras makes of these whichever fits the loss.
    return name in ("accuracy", "acc", "crossentropy", "ce") or keras.metrics.get(name)


def _described(value):
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isfunction(value):
        return f"a function of ({', '.join(inspect.signature(value).parameters)})"
    if isinstance(value, Sequence | Mapping) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    return (
        repr(value)
        if isinstance(value, str | int | float)
        else (f"a {type(value).__name__}")
    )
