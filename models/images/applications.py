"""The networks of `keras.applications`, returning logits, and their weights."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np


def functions() -> dict[str, Callable[..., keras.Model]]:
    """Returns the networks this Keras has, by the name of their function."""
    return {
        name: function
        for name, function in vars(keras.applications).items()
        if inspect.isfunction(function)
    }


def build(
    name: str,
    input_shape: tuple[int, int, int],
    num_outputs: int,
    imagenet: bool = False,
) -> keras.Model:
    """Builds a network of `keras.applications` with random weights.

    Every model of the registry takes pixels in [-1, 1]. Some of these networks
    begin with a layer that scales [0, 255]: it is left out where Keras lets it,
    and fed [0, 255] where it does not (EfficientNetB0 to B7).

    Args:
        name: A key of `functions()`.
        input_shape: Height, width and channels of one example.
        num_outputs: Number of logits.
        imagenet: Whether a layer gives pixels the values that `imagenet_weights` were
            trained on, which differ from network to network.

    Returns:
        A model from [batch, *input_shape] to float32 logits [batch, num_outputs].

    Raises:
        ValueError: If Keras refuses the input shape, most often as too small.
    """
    function = functions()[name]
    options = {}
    inputs = keras.Input(input_shape)
    x = inputs
    if imagenet:
        pixels = _pixels_of(function)
        x = keras.layers.Rescaling(pixels.scale, pixels.offset)(x)
    elif "include_preprocessing" in inspect.signature(function).parameters:
        options["include_preprocessing"] = False
    elif name.startswith("EfficientNetB"):
        x = keras.layers.Rescaling(127.5, offset=127.5)(x)
    try:
        network = function(
            input_tensor=x,
            input_shape=input_shape,
            weights=None,
            classes=num_outputs,
            classifier_activation=None,
            **options,
        )
    except ValueError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"keras.applications.{name} cannot be built for input_shape="
            f"{input_shape} ({reason}); choose larger images or another model."
        ) from error
    logits = network.output
    if logits.dtype != "float32":
        # Under mixed precision: a softmax over half-precision logits overflows.
        logits = keras.layers.Activation("linear", dtype="float32", name="logits")(
            logits
        )
    return keras.Model(inputs, logits, name=network.name)


def imagenet_weights(name: str, input_shape: tuple[int, int, int]) -> keras.Model:
    """Builds a network with its ImageNet weights, which Keras downloads.

    Without the layers that tell the classes, whose names are those of `build`. It takes
    colors in the order in which that network has them: red, green, blue.

    Args:
        name: A key of `functions()`.
        input_shape: Height, width and channels of one example.

    Raises:
        ValueError: If the images have no three colors.
        Exception: Whatever Keras raises where it cannot download them.
    """
    if input_shape[-1] != 3:
        raise ValueError(
            f"the images have {input_shape[-1]} channels, and ImageNet's have 3"
        )
    function = functions()[name]
    network = function(weights="imagenet", include_top=False, input_shape=input_shape)
    order = _pixels_of(function).order
    if order != [0, 1, 2]:
        first = next(each for each in network.layers if each.weights)
        kernel, *rest = first.get_weights()
        first.set_weights([kernel[:, :, order], *rest])
    return network


class _Pixels(NamedTuple):
    """What a network was trained on, of pixels in [-1, 1].

    Attributes:
        scale: Of each channel.
        offset: Of each channel.
        order: Where each channel stands there.
    """

    scale: list[float]
    offset: list[float]
    order: list[int]


def _pixels_of(function):
    """Tries what a network's `preprocess_input` does with a pixel in [0, 255]."""
    preprocess = inspect.getmodule(function).preprocess_input

    def tried(*pixel):
        image = np.array(pixel, np.float32).reshape(1, 1, 1, 3)
        return np.ravel(preprocess(image, data_format="channels_last")).astype(float)

    zero = tried(0, 0, 0)
    slopes = [tried(*row) - zero for row in 127.5 * np.eye(3)]
    order = [int(slope.argmax()) for slope in slopes]
    scale = [float(slopes[i][k]) for i, k in enumerate(order)]
    offset = [float(slopes[i][k] + zero[k]) for i, k in enumerate(order)]
    return _Pixels(scale, offset, order)
