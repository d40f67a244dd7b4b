"""The check itself: the same steps on one device and on towers, from the same start."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builders.steps import words_of_draws
from towers.collectives.joined_hosts import this_host
from towers.devices.resolved import resolve
from towers.keras_adapter.layers import layers_of
from towers.layers.variables import unchanged
from towers.model.api import multi_gpu_model
from towers.model.options import (
    Asynchronous,
    UpdateOptions,
    as_stages,
    as_update,
    grouped,
)
from towers.parity.causes import explain, judge
from towers.parity.report import ROUNDING, Parity, is_equal
from towers.parity.trials import Setting, Trials, in_place, quietly
from towers.tower.errors import ModelError


def check_parity(
    model: keras.Model,
    batch: Any,
    gpus: int | Sequence[int] | Sequence[str] | None = None,
    *,
    parity_steps: int = 3,
    variable_update: str | UpdateOptions = "parameter_server",
    split_ratios: Sequence[int] | None = None,
    loss_placement: str = "auto",
    strict: bool = True,
    tolerance: float | None = None,
    **others: Any,
) -> Parity:
    """Checks that a model trains on towers as it does on one device.

    The model trains a few steps on one device, as in plain Keras, and the same steps on
    towers, from the same start. Losses, metrics, variables, state, optimizer and
    predictions are compared. Training amplifies rounding in some models, so the model
    also trains on one device from a start that is changed by a tenth of the tolerance.
    A difference of up to ten times the result is rounding.

    If towers differ, the function tries to find out why. It tries again with
    `synchronized=True` on BatchNormalization layers, and without random layers.

    Several hosts all call it, with the same model and batches. The model is left as it
    was, except for variables that training creates.

    Examples:
        >>> model.compile("adam", "mse")
        >>> print(check_parity(model, (x[:64], y[:64]), gpus=2))

    Args:
        model: A compiled Keras model.
        batch: What to train each step on: (x, y) or (x, y, sample_weight), with one row
            an example. Or a list of these, one for each step.
        gpus: As for `multi_gpu_model`.
        parity_steps: Number of steps to train, if there is one batch.
        variable_update: As for `multi_gpu_model`.
        split_ratios: As for `multi_gpu_model`.
        loss_placement: As for `multi_gpu_model`.
        strict: As for `multi_gpu_model`. What is refused is not equal, but compared.
        tolerance: Largest difference that counts as equal, relative to the largest
            value of an array. By default 1e-5, or 1e-2 if a model has 16 bits.
        **others: Others of `multi_gpu_model`, such as `stages`.

    Returns:
        What was compared, the verdict, and the reasons.

    Raises:
        ValueError: If an argument has a wrong value, or the loss on one device is not
            finite.
    """
    _check_arguments(model, parity_steps, as_update(variable_update))
    towers = resolve(gpus)
    ratios = split_ratios or (1,) * len(
        grouped(towers, as_stages(others.get("stages", 1)).count)
    )
    given = {"variable_update": variable_update, "loss_placement": loss_placement}
    options = {**given, "split_ratios": ratios, "strict": strict, **others}
    batches = batch if isinstance(batch, list) else [batch] * parity_steps
    return _compare(model, batches, towers, options, tolerance)


def _compare(model, batches, towers, options, tolerance):
    """Compares towers with one device; `options` are those of `multi_gpu_model`."""
    # Those of all hosts.
    count = sum(this_host().exchange(len(options["split_ratios"])))
    batches = [tf.nest.map_structure(_tensor, each) for each in batches]
    if tolerance is None:
        tolerance = 1e-2 if _computes_in_16_bits(model) else 1e-5
    make_parallel = functools.partial(multi_gpu_model, model, towers, **options)
    with quietly(), in_place(model):
        try:
            # What is wrong now is the model; later, it is the other arguments.
            multi_gpu_model(model, towers)
        except ValueError as error:
            return Parity(False, (str(error),), towers=count)
        builder = make_parallel().builder
        builder.create_variables(batches[0])
        with unchanged(model):
            found = _check(
                Trials(model, batches, make_parallel, tolerance, builder.plan)
            )
            if found.rows or not options["strict"]:
                return found
            make_lenient = functools.partial(make_parallel, strict=False)
            lenient = Trials(model, batches, make_lenient, tolerance, builder.plan)
            return _check_refused(found, _check(lenient))


def _check(trials):
    pipeline = trials.plan.pipeline
    found = functools.partial(
        Parity,
        towers=trials.plan.count // pipeline.micro_batches,
        stages=pipeline.stages,
        micro_batches=pipeline.micro_batches,
    )
    try:
        rows = judge(trials, Setting())
    except ModelError as error:
        return found(False, (str(error),))
    # Where it is in the model as it is; causes are looked for in others.
    placement = trials.loss_placement
    equal = is_equal(rows)
    reasons = _remarks(trials, rows) if equal else explain(trials, rows)
    return found(equal, tuple(reasons), rows, loss_placement=placement)


def _check_refused(refused, lenient):
    """Puts a refusal together with what towers would compute all the same."""
    if not lenient.rows:
        return lenient
    reasons = lenient.reasons
    if lenient.equal:
        reasons = ("Here the numbers are equal all the same, with strict=False.",)
    return dataclasses.replace(
        lenient, equal=False, reasons=(*refused.reasons, *reasons)
    )


def _check_arguments(model, parity_steps, update):
    if not isinstance(model, keras.Model) or not model.compiled:
        raise ValueError(
            f"Received {type(model).__name__}; expected a keras.Model that is "
            "compiled, so call `compile` first."
        )
    if parity_steps < 1:
        raise ValueError(f"Received parity_steps={parity_steps}; expected at least 1.")
    if isinstance(update, Asynchronous):
        raise ValueError(
            "Received variable_update='asynchronous', whose towers do not make one "
            "device's updates; expected a way in which towers wait for one another, so "
            "use 'parameter_server' to check the model."
        )


def _tensor(array):
    return array if array is None else tf.convert_to_tensor(array)


def _computes_in_16_bits(model):
    return any(
        layer.compute_dtype in ("float16", "bfloat16") for layer in layers_of(model)
    )


def _remarks(trials, rows):
    """What should be known of models that are equal."""
    if trials.unseeded:
        yield f"The train_step {words_of_draws(trials.unseeded)}."
    if not trials.changes_variables:
        yield "No trainable variable changed, so that this says little."
    if not trials.predicts:
        yield (
            "Predictions are not compared, as the model does not predict for what it "
            "trains on."
        )
    rounded = [row for row in rows if row.verdict == ROUNDING]
    if rounded:
        most = max(rounded, key=lambda row: row.difference)
        yield (
            f"{len(rounded)} of {len(rows)} are equal to rounding, which training "
            f"amplifies here: {most.kind} {most.name} differs by {most.difference:.1e},"
            " where one device, rounded otherwise, differs by "
            f"{most.rounding:.1e} from itself."
        )
