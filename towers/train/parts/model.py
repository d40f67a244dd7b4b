"""The model of a run, as settings describe it: built, put on towers and compiled."""

import os
import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from towers import input_pipeline, models
from towers.devices.configuration import Devices
from towers.devices.names import is_gpu
from towers.keras_adapter.models import has_own_steps
from towers.model.api import multi_gpu_model
from towers.model.tower_model import TowerModel
from towers.tower.preprocess import OfSmallTypes, OnEachTower
from towers.train.parts import training as training_parts
from towers.train.parts.devices import split_ratios, stages, variable_update
from towers.train.parts.setup import Setup
from towers.train.parts.task import described
from towers.train.parts.training import build_optimizer, is_one_hot, learning_rate
from towers.train.settings import is_given

NOT_FINITE = "not_finite.npz"

# Examples that a model is tried on, and the length of what has any.
_TRIED = 8


def build_model(setup: Setup, home: str) -> keras.Model:
    """Builds the model at home, and checks that it fits the data and the task."""
    facts, name = setup.facts, setup.settings.model
    options = setup.settings.options_of_model
    if setup.settings.init_weights == "imagenet":
        options["imagenet"] = True
    with tf.device(home):
        model = models.build(
            name,
            setup.for_model,
            options=options,
            seed=setup.settings.seed,
            module=setup.mine and setup.mine.module,
        )
        try:
            output = _returned(model, facts)
        except ValueError as error:
            takes = getattr(model, "input_shape", None)
            what = {"image": "images", "row": "rows"}.get(facts.input_kind, "inputs")
            other = "another --image_size or " if facts.has_images else ""
            raise ValueError(
                f"The model {name} takes {takes or 'other inputs'}, but the "
                f"{what} of {facts.name} are {facts.input_shape}; give {other}another "
                "model."
            ) from error
        except Exception as error:  # whatever the user's code raises
            raise ValueError(
                f"The model {name} raised {type(error).__name__} when it was "
                f"called, which says: {error}; correct the model."
            ) from error
    takes = getattr(model, "input_shape", None)
    if setup.settings.group_by_length and isinstance(takes, tuple) and takes[1]:
        raise ValueError(
            f"The model {name} takes texts of {takes[1]} tokens, but received "
            "--group_by_length, which makes batches of several lengths; expected "
            "keras.Input of its input_shape, (None,), or no --group_by_length."
        )
    if setup.task is not None:
        _check_output(setup, output)
    return model


def _check_output(setup, output):
    task, facts = setup.task, setup.facts
    shape = getattr(output, "shape", None)
    if shape is not None and (facts.target is None or task.fits(shape, facts)):
        return
    advice = ", as --model=unet returns" if task.kind == "mask" else ""
    returned = shape or f"{len(keras.tree.flatten(output))} tensors in a structure"
    raise ValueError(
        f"The model {setup.settings.model} returns {returned}, but {facts.name} has "
        f"{described(facts.target)}; expected one output of shape "
        f"{task.output_shape(facts)}, a value for each {task.each}{advice}."
    )


def check_can_be_saved(setup: Setup, model: keras.Model) -> None:
    """Checks that Keras can describe the model, before anything is trained.

    Raises:
        ValueError: It cannot, so that no model.keras could be written.
    """
    try:
        keras.saving.serialize_keras_object(model)
    except NotImplementedError as error:
        found = re.search(r"Object (\w+) was created", str(error))
        raise ValueError(
            f"The model {setup.settings.model} cannot be saved: Keras cannot tell with "
            f"which arguments {found[1] if found else 'a part of it'} was made; "
            "expected a method get_config() there that returns them."
        ) from error


def _returned(model, facts):
    """What a model returns, symbolically: a class of the user's has no output_shape."""
    return model(facts.inputs)


def make_preprocess(
    setup: Setup, outputs: int | None = None, kept: Any = None
) -> Callable[[Any, Any, bool], tuple[Any, Any]]:
    """Makes what towers do to local batches.

    The user's `preprocess` comes first. Pictures of a data set that are still bytes
    then become floats in [-1, 1]; inputs of the user's own data stay as they are. At
    last, examples are mixed. Before all of this, what was sent in a small type gets
    the type that models, losses and metrics take.

    Args:
        setup: Of the run.
        outputs: How many values the model returns for an example, if the loss takes as
            many; see `objective.is_one_hot`.
        kept: `KeptExamples` that stay on the devices, if any.
    """
    settings, task, mix = setup.settings, setup.task, None
    if settings.mixes:
        mix = OnEachTower(
            input_pipeline.Mix(
                outputs, settings.mixup_alpha, settings.cutmix_alpha, settings.seed
            )
        )
    dtype = keras.config.dtype_policy().compute_dtype
    own = setup.mine and setup.mine.preprocess(**setup.known)

    def preprocess(x, y, training):
        if own is not None:
            x, y = own(x, y, training)
        images = setup.facts.has_images and x.dtype == tf.uint8
        if mix is not None and y is not None and training:
            x, y = mix(x, y)
        elif outputs is not None and y is not None:
            y = tf.one_hot(y, outputs)
        if task is not None and y is not None:
            y = task.target(y)
        return (input_pipeline.normalize(x, dtype) if images else x), y

    return _of_compact(setup, preprocess, kept)


def _of_compact(setup, preprocess, kept):
    """Returns the preprocessing of what a `compact` pipeline sends."""
    facts = setup.facts
    if facts.input_kind == "own":
        return preprocess
    inputs = keras.tree.map_structure(
        lambda x: x.dtype if "int" in x.dtype else None, facts.inputs
    )
    return OfSmallTypes(preprocess, (inputs, facts.target.dtype, tf.float32), kept)


def build_towers(
    setup: Setup,
    model: keras.Model,
    devices: Devices,
    examples: int | None,
    model_dir: str | None = None,
    kept: Any = None,
) -> TowerModel:
    """Puts the model on towers and compiles it.

    Args:
        setup: How to train it, on what.
        model: The model.
        devices: The devices.
        examples: Examples in an epoch, if known.
        model_dir: Where to remember which way of updating was chosen, and to keep a
            batch whose loss is not finite; `None` for nowhere.
        kept: `KeptExamples` that stay on the devices, if any; they may be read later.
    """
    settings = setup.settings
    if is_one_hot(setup) and has_own_steps(model):
        flag = settings.as_flag("mix") if settings.mixes else ""
        raise ValueError(
            f"Received {flag or '--label_smoothing'}, which gives each class a number, "
            "with a model that defines its own train_step, which is written for "
            "classes; leave the flag out, and do it in the step."
        )
    parallel = multi_gpu_model(
        model,
        gpus=devices.towers,
        variable_update=variable_update(
            settings,
            # What was not asked for may be chosen.
            _home(settings, devices),
            model_dir and os.path.join(model_dir, "variable_update.json"),
        ),
        split_ratios=split_ratios(settings, devices),
        loss_placement=settings.loss_placement,
        strict=settings.strict,
        gradient_compression=settings.gradient_compression,
        preprocess=make_preprocess(
            setup,
            _returned(model, setup.facts).shape[-1] if is_one_hot(setup) else None,
            kept,
        ),
        prefetch=settings.prefetch,
        shard_embeddings=settings.shard_embeddings,
        stages=stages(settings),
        micro_batches=settings.micro_batch_count,
        recompute=settings.recompute,
        check_numerics=settings.check_numerics != "off"
        and model_dir is not None
        and os.path.join(model_dir, NOT_FINITE),
    )
    # Towers that do not wait for one another make a step of the optimizer each.
    steps_per_batch = len(devices.towers) if settings.asynchronous else 1
    with tf.device(devices.home):
        compile_model(setup, parallel, examples, steps_per_batch)
    return parallel


def _home(settings, devices):
    """Where variables are to be, in a word that holds for other towers, too."""
    if settings.shard_embeddings != "none" and not devices.local_parameter_device:
        return "gpu" if is_gpu(devices.home) else "cpu"
    return devices.local_parameter_device


def compile_model(
    setup: Setup,
    model: keras.Model | TowerModel,
    examples: int | None,
    steps_per_batch: int = 1,
) -> None:
    """Compiles the model, and builds its optimizer; see `build_optimizer`."""
    settings = setup.settings
    if setup.defines("optimizer"):
        _check_learning_rate(setup)
        rate = learning_rate(settings, examples, steps_per_batch)
        optimizer = setup.mine.optimizer(learning_rate=rate, **setup.known)
    else:
        optimizer = build_optimizer(settings, examples, steps_per_batch)
    model.compile(
        optimizer,
        **_loss_and_metrics(setup, model),
        steps_per_execution=settings.steps_per_loop,
        jit_compile={"auto": "auto", "true": True, "false": False}[settings.enable_xla],
    )
    model.optimizer.build(model.trainable_variables)


def _check_learning_rate(setup):
    """Checks that a flag of the learning rate reaches the user's own optimizer."""
    if setup.mine.asks("optimizer", "learning_rate"):
        return
    for name in ("learning_rate", "lr_schedule", "warmup_steps"):
        if is_given(setup.settings, name):
            raise ValueError(
                f"Received {setup.settings.as_flag(name)}, but optimizer of "
                f"{str(setup.mine.path)!r} does not ask for learning_rate; expected a "
                "function optimizer(learning_rate), so define one, or leave out the "
                "flag."
            )


def _loss_and_metrics(setup, model):
    """Arguments of `compile`: the user's own, else those of the task."""
    mine, task, known = setup.mine, setup.task, setup.known
    loss = mine and mine.loss(**known)
    metrics = mine and mine.metrics(**known)
    weighted = None
    logits = returns_logits(model, setup)
    if loss is None:
        loss = training_parts.loss(setup, logits)
    if metrics is None and task is not None:
        # By the labels as they were before they were mixed.
        metrics = training_parts.metrics(setup, logits)
        if task.weighted:
            # One that ignores a class by itself counts in whole numbers.
            alone = [m for m in metrics if getattr(m, "ignore_class", None) is not None]
            metrics, weighted = alone, [each for each in metrics if each not in alone]
    return {"loss": loss, "metrics": metrics, "weighted_metrics": weighted}


def metric_names(setup: Setup) -> list[str]:
    """Returns what the metrics are called in the logs, as far as they have names."""
    if setup.defines("metrics"):
        found = keras.tree.flatten(setup.mine.metrics(**setup.known))
    else:
        found = training_parts.metrics(setup, False) if setup.task else []
    return [
        each if isinstance(each, str) else getattr(each, "name", "") for each in found
    ]


def returns_logits(model: keras.Model, setup: Setup) -> bool:
    """Tries whether a model returns logits, as the registry's do, or probabilities.

    Probabilities of one of several classes add up to 1; those of labels are all
    between 0 and 1, and not 0.
    """
    task = setup.task
    if task is None or task.probability is None:
        return False
    softmax = task.probability == "softmax"
    # Whatever the model assigns when it is called, it is only tried.
    with keras.StatelessScope():
        outputs = model(_noise(setup.facts, 1 if softmax else 100))
    outputs = tf.cast(outputs, tf.float32)
    if softmax:
        adds_up = tf.abs(tf.reduce_sum(outputs, axis=-1) - 1) < 1e-2
        return not bool(tf.reduce_all(adds_up) & tf.reduce_all(outputs >= 0))
    inside = (outputs >= 0) & (outputs <= 1)
    return not bool(tf.reduce_all(inside)) or bool(tf.reduce_all(outputs == 0))


def _noise(facts, far):
    """Examples to try a model on: some in [-1, 1], and some `far` times as large."""

    def noise(spec):
        shape = (_TRIED, *(size or _TRIED for size in spec.shape[1:]))
        if not spec.dtype.startswith(("float", "bfloat")):
            # Whatever they mean: all models take these numbers.
            most = min(facts.vocabulary_size or 2, 128)
            drawn = tf.random.stateless_uniform(shape, (0, 0), 0, most, tf.int32)
            return tf.cast(drawn, spec.dtype)
        drawn = 2 * tf.random.stateless_uniform(shape, seed=(0, 0)) - 1
        scale = tf.reshape([1.0, far] * (_TRIED // 2), [-1, *[1] * (len(shape) - 1)])
        return tf.cast(drawn * scale, spec.dtype)

    return keras.tree.map_structure(noise, facts.inputs)
