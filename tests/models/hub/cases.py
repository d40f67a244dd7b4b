"""Every backbone of keras-hub: which are exact, and what hinders the others."""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras_hub import models as hub

from tests.models.hub import images, several, text
from towers.keras_adapter.layers import layers_of

ROWS = several.ROWS
PICTURES = " with pictures"

ALL: dict[str, Any] = {
    **text.SMALL,
    **images.SMALL,
    **several.SMALL,
    **{f"{name}{PICTURES}": made for name, made in several.WITH_PICTURES.items()},
}

# They train as on one device, but their graphs are not read to the end.
COMPARED = {
    "DebertaV3": "it repeats its positions for each example, behind a first axis",
    "DFine": "it loops over the examples to gather the best queries of each",
    f"Gemma3{PICTURES}": "it counts at which rows of all examples' tokens to put them",
}


class Coupling(NamedTuple):
    """Why examples meet, and what towers name."""

    reason: str
    named: str


_CONTRAST = "compares each picture with each text of the batch"
_BALANCE = "adds a loss that multiplies two means over the batch, to balance experts"
COUPLED = {
    "CLIP": Coupling(_CONTRAST, "clip_head"),
    "MetaCLIP2": Coupling(_CONTRAST, "metaclip_2_head"),
    "SigLIP": Coupling(_CONTRAST, "siglip_head"),
    "Mixtral": Coupling(_BALANCE, "add_loss"),
    "QwenMoe": Coupling(_BALANCE, "add_loss"),
    "Qwen3Moe": Coupling(_BALANCE, "add_loss"),
    "Qwen3_5Moe": Coupling(_BALANCE, "add_loss"),
    "StableDiffusion3": Coupling(
        "takes the steps and the scale of the first example for all", "strided_slice"
    ),
    "XLNet": Coupling(
        "reshapes its mask where it means to transpose it", "XLNetAttentionMaskLayer"
    ),
    f"Gemma3n{PICTURES}": Coupling(
        "numbers the tokens that stand for pictures through all examples", "Cumsum"
    ),
    f"Gemma4{PICTURES}": Coupling(
        "adds to each example zero times the sum of all pictures", "interleave"
    ),
}
# Plain Keras does not train them: with which error.
FAILS = {"SAM3PromptableConcept": "Incompatible shapes"}
# They are there to inherit from.
ABSTRACT = {"Backbone", "FeaturePyramidBackbone"}

EXACT = [name for name in ALL if name not in {*COMPARED, *COUPLED, *FAILS}]
# They cannot be computed in float64.
ONLY_IN_FLOAT32 = {
    *("Mixtral", "QwenMoe", "Qwen3Moe", "Qwen3_5", "Qwen3_5Moe"),
    *("T5", "SAM3PromptableConcept"),
}
# They cast to float32 what they normalise, or more.
ROUNDED = {
    *ONLY_IN_FLOAT32,
    *("DINOV2", "Gemma", "Gemma3", f"Gemma3{PICTURES}", "Gemma3n", "Gemma4"),
    *("Mistral", "MobileNetV5", "PaliGemma", "Phi3", "Qwen", "Qwen3", "RWKV7"),
    *("RoformerV2", "T5Gemma", "T5Gemma2"),
}


def class_name(name: str) -> str:
    """Returns the name of the class of a case."""
    return f"{name.removesuffix(PICTURES)}Backbone"


def network(name: str) -> keras.Model:
    """Builds a backbone with a dense layer on each of its outputs."""
    keras.utils.set_random_seed(0)
    arguments = ALL[name]() if callable(ALL[name]) else ALL[name]
    backbone = getattr(hub, class_name(name))(**arguments)
    for layer in layers_of(backbone):
        # Each local batch has a mean of its own, by design, unless it is frozen.
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
        # Not all rates are arguments.
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    outputs = backbone.output
    if name == "SAM":
        # That has no row for each example.
        outputs = {k: v for k, v in outputs.items() if "dense_positional" not in k}
    # What is no number is not trained, nor what has no features.
    floats = [each for each in keras.tree.flatten(outputs) if "float" in each.dtype]
    logits = [
        keras.layers.Dense(2)(each) if each.shape[-1] and each.ndim > 1 else each
        for each in floats
    ]
    return keras.Model(backbone.input, logits[0] if len(logits) == 1 else logits)


def inputs(name: str, model: keras.Model) -> Any:
    """Random inputs of a backbone, by name or alone."""
    random = np.random.default_rng(0)
    given = several.INPUTS.get(name.removesuffix(PICTURES), dict)()

    def made(tensor):
        if tensor.name in given:
            return given[tensor.name].astype(tensor.dtype)
        shape = [ROWS, *(n or text.STEPS for n in tensor.shape[1:])]
        if "int" in tensor.dtype or "bool" in tensor.dtype:
            if "mask" in tensor.name:
                mask = np.ones(shape, tensor.dtype)
                mask[1:, -2:] = 0
                return mask
            most = 2 if "segment" in tensor.name else text.VOCABULARY
            return random.integers(0 if most == 2 else 1, most, shape, tensor.dtype)
        return random.normal(size=shape).astype(tensor.dtype)

    return keras.tree.map_structure(made, model.input)


def targets(model: keras.Model) -> list[np.ndarray]:
    """One random number an example for each output."""
    random = np.random.default_rng(1)
    shapes = [[ROWS] + [1] * (each.ndim - 1) for each in model.outputs]
    return [random.normal(size=shape) for shape in shapes]
