"""The networks of `keras.applications`, without weights, returning logits."""

import inspect
from collections.abc import Callable

import keras


def functions() -> dict[str, Callable[..., keras.Model]]:
    """Returns the networks this Keras has, by the name of their function."""
    return {
        name: function
        for name, function in vars(keras.applications).items()
        if inspect.isfunction(function)
    }


def build(
    name: str, input_shape: tuple[int, int, int], num_outputs: int
) -> keras.Model:
    """Builds a network of `keras.applications` with random weights.

    Every model of the registry takes pixels in [-1, 1]. Some of these networks
    begin with a layer that scales [0, 255]: it is left out where Keras lets it,
    and fed [0, 255] where it does not (EfficientNetB0 to B7).

    Args:
        name: A key of `functions()`.
        input_shape: Height, width and channels of one example.
        num_outputs: Number of logits.

    Returns:
        A model from [batch, *input_shape] to float32 logits [batch, num_outputs].

    Raises:
        ValueError: If Keras refuses the input shape, most often as too small.
    """
    function = functions()[name]
    options = {}
    inputs = keras.Input(input_shape)
    x = inputs
    if "include_preprocessing" in inspect.signature(function).parameters:
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
