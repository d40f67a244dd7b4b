"""Arguments of `multi_gpu_model` that are options of a value now, until Towers 0.3."""

import dataclasses
from typing import Any

from towers.model.options import GPU, UPDATES, Replicated, Stages, UpdateOptions


def update_with(
    asked: str | UpdateOptions = "parameter_server", /, **options: Any
) -> str | UpdateOptions:
    """Returns a way to update variables with options that were arguments before.

    Args:
        asked: The argument `variable_update`.
        **options: Options of any way. Those of another one may have their defaults.

    Raises:
        ValueError: An option is that of another way, or `asked` is a value.
    """
    way = UPDATES.get(asked) if isinstance(asked, str) else None
    own = {field.name for field in dataclasses.fields(way)} if way else set()
    for name, value in options.items():
        if name not in own and not _says_nothing(way, name, value):
            owners = " or ".join(f"towers.{owner.__name__}" for owner in _owners(name))
            raise ValueError(
                f"Received {name}={value!r} with variable_update={asked!r}; expected "
                f"it as an option of {owners}, so give such a value."
            )
    if way is None:
        return asked
    return way(**{name: value for name, value in options.items() if name in own})


def stages_with(asked: int | Stages = 1, /, **options: Any) -> Stages:
    """Returns stages with options that were arguments before.

    Args:
        asked: The argument `stages`.
        **options: Options of `Stages`.

    Raises:
        ValueError: `asked` is a value, or an option is wrong.
    """
    if isinstance(asked, Stages):
        name, value = next(iter(options.items()))
        raise ValueError(
            f"Received {name}={value!r} beside stages={asked!r}; expected it as an "
            "option of that value."
        )
    return Stages(asked, **options)


def _owners(option):
    """The ways that have an option."""
    return [way for way in UPDATES.values() if hasattr(way, option)]


def _says_nothing(way, option, value):
    # The first copy is on the first tower anyway.
    at_first = way is Replicated and option == "device" and value == GPU
    return at_first or value == getattr(_owners(option)[0], option)
