"""Arguments of `multi_gpu_model`, made of options that stand side by side."""

import dataclasses
from typing import Any

from towers.model.options import UPDATES, Stages


def valued(
    variable_update: str = "parameter_server", stages: int = 1, **options: Any
) -> dict[str, Any]:
    """Returns arguments of `multi_gpu_model`: options of values are in the values.

    Args:
        variable_update: The name of a way to update variables.
        stages: Devices of a tower.
        **options: Options of that way or of `Stages`, and other arguments. `None` is as
            if it was not there.
    """
    options = {name: value for name, value in options.items() if value is not None}

    def own(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return {name: options.pop(name) for name in names if name in options}

    way = UPDATES[variable_update]
    values = {
        "variable_update": way(**own(way)),
        "stages": Stages(stages, **own(Stages)),
    }
    return values | options
