"""Prepares images on their way into a batch, by named recipes.

A recipe is a window of the image, and operations on it: for one image, or, where that
is faster, for a batch at once. augment.py has the operations.
"""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from towers.input_pipeline.choices import RECIPES
from towers.input_pipeline.images import augment, randaugment


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to prepare images.

    Attributes:
        draws: Random numbers for each image.
        window: Takes the image's shape and its draws, and chooses y, x, height and
            width of the part to resize; None for the whole image.
        antialias: See `augment.resize`.
        mirror: The position of the draw that mirrors an image where it is below 1/2;
            None mirrors none.
        one: Takes an image of the requested size and its draws, and returns it changed.
        batch: Takes images of the requested size, [B, H, W, C], and their draws [B,
            draws], and returns them changed.
    """

    draws: int = 0
    window: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None
    antialias: str = "fast"
    mirror: int | None = None
    one: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None
    batch: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None


def find(
    name: str,
    training: bool,
    size: tuple[int, int],
    layers_and_magnitude: tuple[int, int] | None = None,
) -> Recipe:
    """Returns the recipe of a name.

    Args:
        name: "none" resizes; "imagenet" takes random windows and mirrors half of them,
            or the middle where it is not training; "cifar" moves and mirrors.
        training: Whether anything is random.
        size: The requested (H, W) of images.
        layers_and_magnitude: The parameters of RandAugment, which comes last; None for
            none.

    Raises:
        ValueError: There is no such recipe.
    """
    if name not in RECIPES:
        raise ValueError(
            f"recipe is {name!r}, expected one of {', '.join(RECIPES)}: choose one"
        )
    recipe = Recipe()
    if name == "imagenet":
        recipe = _imagenet() if training else _middle(*size)
    elif name == "cifar" and training:
        recipe = Recipe(augment.PAD_CROP_FLIP_DRAWS, batch=augment.pad_crop_flip)
    if layers_and_magnitude and training:
        recipe = _with_randaugment(recipe, *layers_and_magnitude)
    return recipe


def takes_whole(name: str) -> bool:
    """Tells whether a recipe begins by resizing whole images, also in evaluation.

    Nothing random comes before, so images can be kept resized.
    """
    return all(
        find(name, training, (1, 1)).window is None for training in (True, False)
    )


def _imagenet() -> Recipe:
    windows = augment.WINDOW_DRAWS
    return Recipe(
        windows + 1,
        window=lambda shape, u: augment.random_window(shape, u[:windows]),
        antialias="none",
        mirror=windows,
    )


def _middle(height: int, width: int) -> Recipe:
    return Recipe(window=lambda shape, _: augment.center_window(shape, height, width))


def _with_randaugment(recipe: Recipe, layers: int, magnitude: int) -> Recipe:
    """Adds RandAugment after the operations on the image or on the batch."""
    begin = recipe.draws
    added = randaugment.randaugment_draws(layers)

    def one(image, u):
        return randaugment.randaugment(image, u[begin:], layers, magnitude)

    def batch(images, u):
        images = recipe.batch(images, u[:, :begin])
        return tf.map_fn(
            lambda pair: randaugment.randaugment(
                pair[0], pair[1][begin:], layers, magnitude
            ),
            (images, u),
            fn_output_signature=tf.TensorSpec(images.shape[1:], images.dtype),
        )

    changed = {"batch": batch} if recipe.batch else {"one": one}
    return dataclasses.replace(recipe, draws=begin + added, **changed)
