"""Explains why a guard has stopped a step.

The guard raises a bare `StoppedStep`, which the model passes to this module, so that a
step need not know checkpoints and layers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.builders.builder import Builder
from towers.builders.guard import StoppedStep
from towers.collectives import batch
from towers.keras_adapter.models import has_own_steps
from towers.numerics import recorded_step, search
from towers.numerics.errors import NotFiniteStep
from towers.numerics.recorded_step import RecordedStep, find_row, named
from towers.numerics.search import NonFiniteOrigin


def explain(
    builder: Builder,
    stopped: StoppedStep,
    given: Mapping[str, Any],
    place: str,
    file: str | None,
) -> NotFiniteStep:
    """Explains why a guard has stopped a step.

    Args:
        builder: The builder of the step.
        stopped: The step.
        given: The arguments of `fit` by name, if `fit` runs.
        place: The epoch and batch of `fit`, as a phrase; "" if they are not known.
        file: The file to write the step to, for `locate`, if any.

    Returns:
        The error to raise.
    """
    raw = keras.utils.unpack_x_y_sample_weight(stopped.data)
    stopped.undo()
    builder.mark_copies_stale()
    if has_own_steps(builder.model):
        return _explain_own_step(builder, stopped, raw, given, place, file)
    recorded = _record(builder, stopped, raw)
    with tf.device(builder.plan.devices[stopped.tower or 0]):
        origin = search.search(builder.model, recorded)
    row = ""
    if origin.source == "data":
        origin, row = _trace_to_row(origin, raw, given)
    written = ""
    if file is not None:
        try:
            recorded_step.write(file, recorded)
            written = f"; the batch is in {file}"
        except (OSError, ValueError) as error:
            written, file = f"; the batch cannot be written to {file}: {error}", None
    text = f"{_sentence(stopped, place, origin, row)}; nothing of the step was applied"
    return NotFiniteStep(stopped.step, origin, f"{text}{written}", file)


def _explain_own_step(builder, stopped, raw, given, place, file):
    """Explains a step that the model defines itself, without repeating the step."""
    plan = builder.plan
    # Each host knows its own towers. An asynchronous step has a single tower.
    blamed = stopped.blamed if stopped.tower is None else (stopped.tower,)
    count = plan.pipeline.micro_batches
    # `blamed` has indices of devices, but the index of a tower of an asynchronous step.
    several = count if stopped.tower is None else 1
    tower = plan.towers[blamed[0] * several].index if blamed else None
    origin = dataclasses.replace(
        search.in_data(raw) or NonFiniteOrigin("gradient"),
        tower=tower,
        towers=plan.count,
        micro_batches=count,
        examples=batch.batch_size(raw),
    )
    row = ""
    if origin.source == "data":
        origin, row = _trace_to_row(origin, raw, given)
    text = (
        f"{_sentence(stopped, place, origin, row)}; the optimizer did not apply this "
        "gradient; what the step did before it stays"
    )
    if file is not None:
        text += (
            f"; {file} is not written, as a step of the model's own cannot be repeated"
        )
    return NotFiniteStep(stopped.step, origin, text, None)


def _sentence(stopped, place, origin, row):
    skipped = ""
    if stopped.skipped:
        skipped = f", after {stopped.skipped} skipped for the loss scale"
    where = f" ({place})" if place else ""
    return f"Step {stopped.step}{where}{skipped}: {origin}{row}; {origin.advice}"


def _trace_to_row(origin, raw, given):
    """Returns an origin in the data, and a clause with its row in the data of `fit`."""
    tensor, row = named(raw).get(origin.name), origin.rows[0]
    if tensor is None or not search.bad_rows(tensor, batch.batch_size(raw)):
        name = f"what `preprocess` has made of {origin.name}"
        return dataclasses.replace(origin, name=name), ""
    matches = find_row(given, origin.name, np.asarray(tensor[row]))
    if not matches:
        return origin, ""
    equal = f" or one of {len(matches) - 1} like it" if len(matches) > 1 else ""
    row_name = f"{origin.name}[{matches[0]}]{equal}"
    return origin, f"; it is {row_name} of what `fit` has got"


def _record(builder, stopped, raw):
    model, ratios = builder.model, builder.plan.split_ratios
    if stopped.tower is not None:
        # The batch belongs to one tower of an asynchronous step. Other towers may have
        # updated the variables since.
        ratios = (1,)
    data = builder.preprocess_batch(raw, training=True)
    values = [variable.value for variable in search.variables_of(model)]
    return RecordedStep(
        stopped.step,
        data,
        [tf.convert_to_tensor(value) for value in values],
        ratios,
        stopped.tower or 0,
        builder.plan.count,
        builder.plan.pipeline.micro_batches,
    )
