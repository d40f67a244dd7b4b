"""Compares values that must be the same on all hosts before they compute."""

import collections
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.collectives.world import World
from towers.hosts.group import HostsDifferError
from towers.keras_adapter.models import compile_arguments
from towers.program import words

_LONGEST = 60
# Entries of a configuration that are random, or depend on the batch at build time.
_LEFT_OUT = "seed", "build_config", "build_input_shape", "registered_name"
# XLA may compile on one machine and not on another.
_OF_A_HOST = "jit_compile", "auto_scale_loss"


def check(hosts: World, value: Mapping[str, Any]) -> None:
    """Raises an error if hosts were given different values.

    Args:
        hosts: All hosts, which call this together.
        value: The values of this host, by names that make a phrase: {"fit": {"epochs":
            2}} gives "epochs of fit". The leaves must be JSON.

    Raises:
        HostsDifferError: On all hosts, if values differ.
    """
    text = json.dumps(value, sort_keys=True).encode()
    # A model's configuration may be large, and is nearly always the same on all hosts.
    if len({*hosts.exchange(hashlib.sha256(text).hexdigest())}) > 1:
        raise HostsDifferError(difference(hosts.names, hosts.exchange(dict(value))))


def difference(names: Sequence[str], values: Sequence[Mapping[str, Any]]) -> str:
    """Describes in a sentence how the values of hosts differ.

    Args:
        names: The name of each host.
        values: The values of each host; see `check`.
    """
    leaves_of_hosts = [dict(_leaves(value)) for value in values]
    keys = dict.fromkeys(key for leaves in leaves_of_hosts for key in leaves)
    different = [
        key for key in keys if len({leaves.get(key) for leaves in leaves_of_hosts}) > 1
    ]
    by_value: dict[str, list[str]] = {}
    for name, leaves in zip(names, leaves_of_hosts, strict=True):
        text = leaves.get(different[0], "none")
        by_value.setdefault(_short(text), []).append(name)
    listing = words.all_of(
        f"{text} on {words.all_of(which)}" for text, which in by_value.items()
    )
    more = len(different) - 1
    others = f", and in {more} more" if more else ""
    return (
        f"Hosts differ in {' of '.join(reversed(different[0]))}: {listing}{others}; "
        "hosts that train together have to run the same program with the same "
        "arguments and the same data."
    )


def _leaves(value, path=()):
    """Yields the path of each leaf in a nest of mappings, and the leaf as JSON."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    else:
        text = json.dumps(value, sort_keys=True)
        yield path, "none" if text == "null" else text


def _short(text):
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


# Descriptions of a model and of data by properties that must be the same on all hosts.


def of_model(model: keras.Model) -> dict[str, Any]:
    """Describes a model: its layers, variables, and arguments of `compile`.

    Numbered names of Keras are renumbered as if there were no other model. A learning
    rate that is a variable is left out, as all hosts use the first host's.

    Returns:
        A nest of dictionaries by names, with JSON leaves.
    """
    names = _Names()
    try:
        config = model.get_config()
    except Exception:
        # The configuration of a user's class is optional.
        config = {}
    weights = {
        f"variable {names.of_path(variable.path)}, number {k}": [
            *(list(variable.shape), str(variable.dtype), bool(variable.trainable))
        ]
        for k, variable in enumerate(model.weights)
    }
    compiled = dict(compile_arguments(model))
    optimizer = compiled.pop("optimizer", None) and model.optimizer
    described = {"class": type(model).__name__, **_plain(config, names), **weights}
    return {
        "the model": described,
        "the optimizer": _plain(optimizer, names),
        "compile": {
            name: _plain(value, names)
            for name, value in compiled.items()
            if name not in _OF_A_HOST
        },
    }


def of_data(data: Any) -> Any:
    """Describes the data that `fit` and its siblings are given, as `of_model` does.

    Tensors are described by the shape of an example and the type; arrays by the number
    of examples, too, and data sets by the number of batches, if it is known.
    """
    described = {}
    if (pipeline := getattr(data, "pipeline", None)) is not None:
        known = {**pipeline.order, **pipeline.makes}
        described |= json.loads(json.dumps(known, default=int))
    if isinstance(data, tf.data.Dataset):
        spec = tf.nest.flatten(data.element_spec)
        described["elements"] = [*map(_spec, spec)]
        if pipeline is None:
            # A host whose data end early would wait for the others for ever.
            described["batches"] = int(data.cardinality())
        return described
    if isinstance(data, keras.utils.PyDataset):
        return {"class": type(data).__name__, "batches": data.num_batches}
    arrays = keras.tree.flatten(data)
    if arrays and all(hasattr(array, "shape") for array in arrays):
        return {
            "examples": [*map(_length, arrays)],
            "elements": [*map(_spec, arrays)],
        }
    return {"class": type(data).__name__}


class _Names:
    """Renumbers names in the order of their first use."""

    def __init__(self):
        self._known: dict[str, str] = {}
        self._counts: collections.Counter = collections.Counter()

    def of(self, name: str) -> str:
        """Returns the renumbered name."""
        if name not in self._known:
            base = re.sub(r"(_\d+)+$", "", name)
            count = self._counts[base]
            self._counts[base] += 1
            self._known[name] = f"{base}_{count}" if count else base
        return self._known[name]

    def of_path(self, path: str) -> str:
        """Returns the renumbered path of a variable, whose last part is no layer."""
        *layers, last = path.split("/")
        return "/".join([*map(self.of, layers), last])

    def if_known(self, text: str) -> str:
        """Returns the renumbered name if the text is a known name, else the text."""
        return self._known.get(text, text)


def _plain(value, names):
    """Converts a configuration to JSON that is the same on all hosts."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return names.if_known(value)
    if isinstance(value, Mapping):
        return _of_mapping(value, names)
    if isinstance(value, list | tuple):
        return [_plain(item, names) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        return [str(array.dtype), [*array.shape], digest]
    if not hasattr(value, "get_config"):
        return getattr(value, "__name__", type(value).__name__)
    try:
        config = value.get_config()
    except Exception:
        config = {}
    if isinstance(value, keras.optimizers.Optimizer):
        rate = config.get("learning_rate")
        if isinstance(rate, float):
            config = {k: v for k, v in config.items() if k != "learning_rate"}
    return {"class": type(value).__name__, **_of_mapping(config, names)}


def _of_mapping(config, names):
    if config.get("class_name") == "__lambda__":
        # The code of a lambda contains the path of its file.
        return "a lambda"
    plain_config = {}
    for key, value in config.items():
        if key in _LEFT_OUT:
            continue
        if key == "batch_shape" and isinstance(value, list | tuple):
            value = value[1:]  # the batch size at build time may differ
        if key == "name" and isinstance(value, str):
            plain_config[key] = names.of(value)
        elif key == "layers" and isinstance(value, list | tuple):
            # With the layer's name, a message names the layer instead of a number.
            for k, item in enumerate(value):
                plain = _plain(item, names)
                inner = plain.get("config") if isinstance(plain, dict) else None
                name = inner.get("name", "") if isinstance(inner, dict) else ""
                plain_config[f"layer {k} {name}".strip()] = plain
        else:
            plain_config[str(key)] = _plain(value, names)
    return plain_config


def _spec(tensor):
    shape = tf.TensorShape(getattr(tensor, "shape", None))
    dtype = getattr(tensor, "dtype", None)
    name = getattr(dtype, "name", str(dtype))
    known = None if shape.rank is None else shape.as_list()[1:]
    return [type(tensor).__name__, name, known]


def _length(array):
    return int(array.shape[0]) if len(array.shape) else None
