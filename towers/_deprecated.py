"""Public names that have changed: the old ones work until Towers 0.3, and say so.

They are here, so that they can end with this file; old flags that are parts of others
now are in `towers/program/flags/old_flags.py`. This file imports nothing of ours.
"""

import functools
import re
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, TypeVar

# By function or class: new names of arguments, by the old ones.
ARGUMENTS = {
    "multi_gpu_model": {
        "builder": "variable_update",
        "shares": "split_ratios",
    },
    "check_parity": {
        "builder": "variable_update",
        "shares": "split_ratios",
        "steps": "parity_steps",
    },
    "open_source": {
        "test_split": "eval_split",
        "image_key": "image_column",
        "label_key": "label_column",
    },
    "Checkpoint": {"keep": "keep_checkpoints"},
    "Stall": {"seconds": "stall_seconds"},
    "Starvation": {"every_steps": "log_steps"},
    "TensorBoard": {"every_steps": "log_steps"},
}
# By arguments that are options of a value now: the argument that takes the value, a
# class of `towers` that has the option, and the option.
OPTIONS = {
    "local_parameter_device": ("variable_update", "ParameterServer", "device"),
    "home": ("variable_update", "ParameterServer", "device"),
    "packed": ("variable_update", "ParameterServer", "packed"),
    "all_reduce_alg": ("variable_update", "Replicated", "all_reduce"),
    "shard_optimizer_state": (
        "variable_update",
        "Replicated",
        "shard_optimizer_state",
    ),
    "max_staleness": ("variable_update", "Asynchronous", "max_staleness"),
    "choice_file": ("variable_update", "Auto", "choice_file"),
    "placement": ("stages", "Stages", "placement"),
    "pipeline_schedule": ("stages", "Stages", "schedule"),
}
# By class: new names of attributes, by the old ones.
ATTRIBUTES = {
    "NotFiniteStep": {"finding": "origin"},
    "Throughput": {"images_per_sec": "examples_per_sec"},
}
# New names of arguments that 0.3 has first.
_SINCE_0_3 = ("image_column", "label_column")
# Where a program has the new flag, and none of the old name.
FLAGS = {"tower_shares": "split_ratios", "towers": "num_gpus"}
# Of summary.json, variable_update.json, and Keras's logs and history.
KEYS = {
    "images_per_sec": "examples_per_sec",
    "logs": "model_dir",
    "shares": "split_ratios",
    "home": "local_parameter_device",
    "builder": "variable_update",
}
# Parts of TensorBoard's tags.
TAGS = {"images_per_sec": "examples_per_sec", "samples_per_sec": "examples_per_sec"}

Named = TypeVar("Named", bound=Callable[..., Any])


def accepts_old_names(named: Named, **values: Callable[..., Any]) -> Named:
    """Decorates a function or class whose arguments or attributes have new names.

    Args:
        named: The function or class.
        **values: For each argument of `OPTIONS` that takes a value: a function that
            returns one. It takes what was given for the argument, if anything was, and
            options by their names.
    """
    arguments = ARGUMENTS.get(named.__name__, {})
    if not isinstance(named, type):
        return _accepting(named, arguments, values)
    if arguments:
        named.__init__ = _accepting(named.__init__, arguments)
    for old, new in ATTRIBUTES.get(named.__name__, {}).items():
        setattr(named, old, _attribute(named.__name__, old, new))
    return named


def rename_flags(
    arguments: Iterable[str], known: Container[str]
) -> tuple[list[str], list[str]]:
    """Gives flags their new names.

    Args:
        arguments: Of a command line, or lines of a flag file.
        known: The flags that the program has.

    Returns:
        The arguments by their new names, and a sentence for each old one.
    """
    renamed, notes = [], []
    for argument in arguments:
        flag = re.match(r"(--?)(\w+)", argument)
        new = flag and FLAGS.get(flag[2])
        if new and new in known and flag[2] not in known:
            notes.append(_sentence(f"--{flag[2]}", f"--{new}"))
            argument = f"{flag[1]}{new}{argument[flag.end() :]}"
        renamed.append(argument)
    return renamed, notes


def rename_keys(content: Any) -> Any:
    """Gives the keys of JSON that an earlier version has written their new names."""
    if not isinstance(content, Mapping):
        return content
    return {KEYS.get(key, key): value for key, value in content.items()}


def rename_tag(tag: str) -> str:
    """Gives a tag of TensorBoard its new name."""
    for old, new in TAGS.items():
        tag = tag.replace(old, new)
    return tag


def with_old_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the old keys to what is written, for programs of others that read it."""
    old = {old: content[new] for old, new in KEYS.items() if new in content}
    return {**content, **old}


def _accepting(function, arguments, values=()):
    @functools.wraps(function)
    def call(*args, **kwargs):
        for old in kwargs.keys() & arguments.keys():
            new = arguments[old]
            if new in kwargs:
                raise TypeError(
                    f"Received both {old} and {new}, which is its new name; expected "
                    f"{new} alone."
                )
            _warn(f"The argument {old}", new)
            kwargs[new] = kwargs.pop(old)
        moved = {argument: {} for argument in values}
        for old in [name for name in kwargs if values and name in OPTIONS]:
            argument, owner, option = OPTIONS[old]
            _warn(f"The argument {old}", f"{argument}=towers.{owner}({option}=...)")
            moved[argument][option] = kwargs.pop(old)
        for argument, options in moved.items():
            if options:
                given = [kwargs[argument]] if argument in kwargs else []
                kwargs[argument] = values[argument](*given, **options)
        return function(*args, **kwargs)

    return call


def _attribute(name, old, new):
    def read(self):
        _warn(f"{name}.{old}", f"{name}.{new}")
        return getattr(self, new)

    return property(read)


def _warn(old, new):
    # Python shows it to all, and a DeprecationWarning to few.
    warnings.warn(_sentence(old, new), FutureWarning, stacklevel=3)


def _sentence(old, new):
    until = "0.4" if new in _SINCE_0_3 else "0.3"
    return f"{old} is now {new}; the old name works until Towers {until}."
