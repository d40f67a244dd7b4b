"""The model of a run, as settings describe it: built, put on towers and compiled."""

import os
import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from towers import input_pipeline, models
from towers.devices import Devices
from towers.model.api import multi_gpu_model
from towers.model.tower_model import TowerModel
from towers.train.parts.devices import split_ratios
from towers.train.parts.optimizer import build_optimizer
from towers.train.settings import Settings

NOT_FINITE = "not_finite.npz"


def build_model(
    settings: Settings,
    source: input_pipeline.Source,
    image_shape: tuple[int, ...],
    home: str,
) -> keras.Model:
    """Builds the model at home, and checks that it fits the data."""
    with tf.device(home):
        model = models.build(
            settings.model,
            input_shape=image_shape,
            num_classes=source.num_classes,
            options={"imagenet": True} if settings.init_weights == "imagenet" else {},
            seed=settings.seed,
        )
        try:
            output = _returned(model, image_shape)
        except ValueError as error:
            takes = getattr(model, "input_shape", None)
            what, other = "images", "another --image_size or "
            if len(image_shape) == 1:
                what, other = "rows", ""
            raise ValueError(
                f"The model {settings.model} takes {takes or 'other inputs'}, but the "
                f"{what} of {source.name} are {image_shape}; give {other}another model."
            ) from error
        except Exception as error:  # whatever the user's code raises
            raise ValueError(
                f"The model {settings.model} raised {type(error).__name__} when it was "
                f"called, which says: {error}; correct the model."
            ) from error
    shape = getattr(output, "shape", None)
    if shape is None or len(shape) != 2 or (shape[-1] or 0) < source.num_classes:
        returned = shape or f"{len(keras.tree.flatten(output))} tensors in a structure"
        raise ValueError(
            f"The model {settings.model} returns {returned}, but {source.name} has "
            f"labels from 0 to {source.num_classes - 1}; expected one output of shape "
            f"(None, {source.num_classes}), a value for each class."
        )
    return model


def check_can_be_saved(settings: Settings, model: keras.Model) -> None:
    """Checks that Keras can describe the model, before anything is trained.

    Raises:
        ValueError: It cannot, so that no model.keras could be written.
    """
    try:
        keras.saving.serialize_keras_object(model)
    except NotImplementedError as error:
        found = re.search(r"Object (\w+) was created", str(error))
        raise ValueError(
            f"The model {settings.model} cannot be saved: Keras cannot tell with which "
            f"arguments {found[1] if found else 'a part of it'} was made; expected a "
            "method get_config() there that returns them."
        ) from error


def _returned(model, image_shape):
    """What a model returns, symbolically: a class of the user's has no output_shape."""
    return model(keras.KerasTensor((None, *image_shape)))


def make_preprocess(
    settings: Settings, outputs: int | None = None
) -> Callable[[Any, Any, bool], tuple[Any, Any]]:
    """Makes what towers do to local batches: bytes to floats in [-1, 1], and mixing.

    Args:
        settings: Whether to mix.
        outputs: How many values the model returns for an image; needed to mix.
    """
    mix = None
    if settings.mixes:
        mix = input_pipeline.Mix(
            outputs, settings.mixup_alpha, settings.cutmix_alpha, settings.seed
        )
    dtype = keras.config.dtype_policy().compute_dtype

    def preprocess(x, y, training):
        images = x.dtype == tf.uint8
        if mix is not None and y is not None:
            x, y = mix(x, y) if training else (x, tf.one_hot(y, outputs))
        return (input_pipeline.normalize(x, dtype) if images else x), y

    return preprocess


def build_towers(
    settings: Settings,
    model: keras.Model,
    devices: Devices,
    image_shape: tuple[int, ...],
    examples: int | None,
    model_dir: str | None = None,
) -> TowerModel:
    """Puts the model on towers and compiles it.

    Args:
        settings: How to train it.
        model: The model.
        devices: The devices.
        image_shape: Shape of an image, or of a row.
        examples: Examples in an epoch, if known.
        model_dir: Where to remember which way of updating was chosen, and to keep a
            batch whose loss is not finite; `None` for nowhere.
    """
    parallel = multi_gpu_model(
        model,
        gpus=devices.towers,
        # What was not asked for may be chosen.
        local_parameter_device=devices.home if devices.local_parameter_device else None,
        variable_update=settings.variable_update,
        split_ratios=split_ratios(settings, devices),
        loss_placement=settings.loss_placement,
        strict=settings.strict,
        all_reduce_alg=settings.all_reduce_alg,
        choice_file=model_dir and os.path.join(model_dir, "variable_update.json"),
        max_staleness=settings.max_staleness,
        preprocess=make_preprocess(
            settings,
            _returned(model, image_shape).shape[-1] if settings.mixes else None,
        ),
        prefetch=settings.prefetch,
        check_numerics=settings.check_numerics != "off"
        and model_dir is not None
        and os.path.join(model_dir, NOT_FINITE),
    )
    # Towers that do not wait for one another make a step of the optimizer each.
    steps_per_batch = len(devices.towers) if settings.asynchronous else 1
    with tf.device(devices.home):
        compile_model(settings, parallel, image_shape, examples, steps_per_batch)
    return parallel


def compile_model(
    settings: Settings,
    model: keras.Model | TowerModel,
    image_shape: tuple[int, ...],
    examples: int | None,
    steps_per_batch: int = 1,
) -> None:
    """Compiles the model, and builds its optimizer; see `build_optimizer`.

    The shape is that of an image, or of a row.
    """
    loss = keras.losses.SparseCategoricalCrossentropy
    if settings.mixes:
        loss = keras.losses.CategoricalCrossentropy
    model.compile(
        build_optimizer(settings, examples, steps_per_batch),
        loss(from_logits=returns_logits(model, image_shape)),
        # By the labels as they were before they were mixed.
        metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
        steps_per_execution=settings.steps_per_loop,
        jit_compile={"auto": "auto", "true": True, "false": False}[settings.enable_xla],
    )
    model.optimizer.build(model.trainable_variables)


def returns_logits(model: keras.Model, image_shape: tuple[int, ...]) -> bool:
    """Tries whether a model returns logits, as the registry's do, or probabilities."""
    noise = tf.random.stateless_uniform((2, *image_shape), seed=(0, 0))
    outputs = tf.cast(model(2 * noise - 1), tf.float32)
    adds_up = tf.abs(tf.reduce_sum(outputs, axis=-1) - 1) < 1e-2
    return not bool(tf.reduce_all(adds_up) & tf.reduce_all(outputs >= 0))
