"""Names to models: the one list of what can be trained by name.

A name is one of this project's own families, a network of `keras.applications`
(in any case), `hub:PRESET` for a preset of keras-hub, or `file.py:function` for a
function of the user's own. Those of images take pixels in [-1, 1]. All but the user's
return float32 logits.

Nothing here knows of devices. Data, losses and optimizers are for whoever calls,
and so is the check that a user's own model has `num_outputs` outputs.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import keras
import numpy as np

from towers.models import dlrm, hub, mlp, spec, user_file
from towers.models.facts import Facts, arguments, is_count, unknown_shape
from towers.models.images import applications, cnn, lstm, resnet_cifar, unet
from towers.models.text import transformer_encoder, transformer_lm

# A model's own function; facts.py says which parameters it may have.
Builder = Callable[..., keras.Model]

# What an example may be, as messages say it.
_KINDS = {
    "image": "images of shape (height, width, channels)",
    "row": "rows of numbers",
    "tokens": "tokens of text",
    "columns": "several inputs, by name",
}

_OWN: dict[str, Builder] = {
    "cnn": cnn.build,
    "dlrm": dlrm.build,
    "lstm": lstm.build,
    "mlp": mlp.build,
    **{
        f"resnet{depth}": functools.partial(resnet_cifar.build, depth=depth)
        for depth in resnet_cifar.DEPTHS
    },
    "transformer_encoder": transformer_encoder.build,
    "transformer_lm": transformer_lm.build,
    "unet": unet.build,
}


def build(
    name: str,
    facts: Facts | None = None,
    *,
    input_shape: Sequence[int] | None = None,
    num_classes: int | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int | None = None,
    module: ModuleType | None = None,
) -> keras.Model:
    """Builds a model by name.

    Args:
        name: A name from `spec.names()`, in any case; `hub:PRESET`, see `spec`; or
            `file.py:function`, where the function returns a Keras model. Its
            parameters are what it asks for of the data, by the names of `Facts`, such
            as `build(input_shape, num_classes)`.
        facts: What the data has.
        input_shape: In place of `facts`, for classification: the shape of one example
            without the batch, such as (height, width, channels) for images.
        num_classes: With `input_shape`: the number of logits.
        options: Further arguments of the model, such as {"width": 256}.
        seed: Makes the first weights and the dropout reproducible. The caller's
            own random state is left as it was. None draws from that state.
        module: The user's file, if it has been loaded already.

    Returns:
        A model from [batch, *input_shape] to float32 logits, with `num_outputs` for an
        example, a pixel or a token; a model from the user's own file is returned as it
        is.

    Raises:
        ValueError: If the name, a fact or an option is wrong, or the user's file or
            function fails.
    """
    spec.check(name)
    if facts is None:
        if not is_count(num_classes):
            raise ValueError(
                f"num_classes must be a whole number of at least 1, but {num_classes!r}"
                " was received; give the number of classes of the data."
            )
        facts = Facts(
            input_shape=input_shape, num_classes=num_classes, num_outputs=num_classes
        )
    with _seeded(seed):
        if spec.is_user_file(name):
            path, function = spec.split_user_file(name)
            module = module or user_file.load(path)
            return user_file.build(module, path, function, facts, options or {})
        if spec.is_hub(name):
            return hub.build(*spec.split_hub(name), facts)
        return _build_own(spec.canonical(name), facts, options or {})


def _build_own(name, facts, options):
    shape = facts.input_shape
    # Texts may be of any length; pictures and rows are of one size.
    if not isinstance(shape, Mapping) and len(shape) > 1 and None in shape:
        raise unknown_shape(shape)
    needs, what = spec.inputs(name), facts.input_kind
    if what not in needs:
        others = [each for each in spec.OWN if what in spec.inputs(each)]
        if what == "tokens" and facts.task is not None:
            of_language = facts.task == "language_model"
            others = ["transformer_lm" if of_language else "transformer_encoder"]
        others += ["a model of your own"]
        if what == "row" and "columns" in needs:
            others += ["columns of text, which --feature_columns names"]
        raise ValueError(
            f"The model {name!r} needs {' or '.join(map(_KINDS.get, needs))}, but "
            f"{_KINDS[what]} with input_shape={facts.input_shape} were received; use "
            f"{', '.join(others[:-1])}, or {others[-1]}."
        )
    function = _OWN.get(name) or functools.partial(applications.build, name)
    given, named = arguments(function, f"The model {name!r}", facts, options)
    return function(*given, **named)


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
