"""What becomes of an image on its way into a batch, by name.

A recipe is a window of the image, and what is done with it: for one image, or, where
that is faster, for a batch at once. The functions themselves stand in augment.py.
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
            width of what is resized; None for all of it.
        antialias: See `augment.resize`.
        one: Takes an image of the size wanted and its draws, and returns it changed.
        batch: Takes images of the size wanted, [B, H, W, C], and their draws [B,
            draws], and returns them changed.
    """

    draws: int = 0
    window: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None
    antialias: str = "fast"
    one: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None
    batch: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None


def find(
    name: str,
    training: bool,
    size: tuple[int, int],
    layers_and_magnitude: tuple[int, int] | None = None,
) -> Recipe:
    """Returns a recipe.

    Args:
        name: "none" resizes; "imagenet" takes random windows and mirrors half of them,
            or the middle where it is not training; "cifar" moves and mirrors.
        training: Whether anything is to be random.
        size: (H, W) of the images wanted.
        layers_and_magnitude: Of RandAugment, which comes last; None for none.

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

    Nothing random is done before, so that images can be kept as they are then.
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
        one=lambda image, u: augment.flip(image, u[windows]),
    )


def _middle(height: int, width: int) -> Recipe:
    return Recipe(window=lambda shape, _: augment.center_window(shape, height, width))


def _with_randaugment(recipe: Recipe, layers: int, magnitude: int) -> Recipe:
    """Adds RandAugment, behind what is done by the image or by the batch."""
    begin, before = recipe.draws, recipe.one
    added = randaugment.randaugment_draws(layers)

    def one(image, u):
        image = before(image, u[:begin]) if before else image
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
