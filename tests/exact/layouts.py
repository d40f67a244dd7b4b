"""How many stages the model of an exact case can have."""

from towers.layers.pipeline import placeable

# Of models that are built by their data: how many layers have weights.
BUILT_LATER = {
    "batches/ragged inputs": 1,
    "models/not built": 1,
    "state/BatchNormalization, called for inference": 2,
}


def stages_of(case, model, most):
    """Returns as many stages as there can be, each of a layer with weights."""
    count = BUILT_LATER.get(str(case), most)
    if model.built:
        count = sum(bool(layer.weights) for layer in placeable(model))
    return max(min(most, count), 1)
