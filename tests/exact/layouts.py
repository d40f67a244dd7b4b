"""How the model of an exact case is divided among stages."""

import dataclasses
import re

from towers.layers.pipeline import balanced, weighted

# Of models that are built by their data: how many layers have weights.
BUILT_LATER = {
    "batches/ragged inputs": 1,
    "models/not built": 1,
    "state/BatchNormalization, called for inference": 2,
}


def in_stages(case, model, most):
    """Returns arguments of `multi_gpu_model`, for as many stages as there can be.

    Each has a layer with weights. Which ones they are does not hang on the clock.
    """
    if not model.built:
        return {"stages": min(BUILT_LATER.get(str(case), most), most)}
    layers = weighted(model)
    stages = max(min(most, len(layers)), 1)
    if stages == 1:
        return {}
    found = balanced(model, stages)
    # Within a model, names are unique.
    placement = {
        re.escape(layer.path or layer.name): found[id(layer)] for layer in layers
    }
    return {"stages": stages, "placement": placement}


def refused(case):
    """Returns the case with what towers of stages do not compute, as refused."""
    if "synchronized" in case.name:
        return dataclasses.replace(case, expect="expected synchronized=False")
    return case
