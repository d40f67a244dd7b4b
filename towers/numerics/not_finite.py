"""Says what was wrong with a step that a guard has stopped.

The guard raises a bare `StoppedStep`, which the model hands to this module: so a step
knows nothing of checkpoints and layers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.builders.builder import Builder
from towers.builders.guard import StoppedStep
from towers.builders.step_function import has_own_steps
from towers.collectives import batch
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
    """Finds out what was wrong with a step that a guard has stopped.

    Args:
        builder: Whose step it is.
        stopped: The step.
        given: The arguments of `fit` by name, if it is `fit` that runs.
        place: Epoch and batch that `fit` is at, as a phrase; "" if they are not known.
        file: Where to write the step, for `locate`, if anywhere.

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
    """The same for a step that the model defines itself, which is not repeated."""
    plan = builder.plan
    # Each host knows of its own towers. One that does not wait for others is alone.
    blamed = stopped.blamed if stopped.tower is None else (stopped.tower,)
    count = plan.pipeline.micro_batches
    # Towers that are alone are counted one by one, all others by their devices.
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
    """Returns an origin in the data, and a clause that names its row in `fit`'s."""
    tensor, row = named(raw).get(origin.name), origin.rows[0]
    if tensor is None or not search.bad_rows(tensor, batch.batch_size(raw)):
        name = f"what `preprocess` has made of {origin.name}"
        return dataclasses.replace(origin, name=name), ""
    places = find_row(given, origin.name, np.asarray(tensor[row]))
    if not places:
        return origin, ""
    equal = f" or one of {len(places) - 1} like it" if len(places) > 1 else ""
    place = f"{origin.name}[{places[0]}]{equal}"
    return origin, f"; it is {place} of what `fit` has got"


def _record(builder, stopped, raw):
    model, ratios = builder.model, builder.plan.split_ratios
    if stopped.tower is not None:
        # It is the batch of one of towers that do not wait for one another. Others may
        # have updated since what it has computed with.
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
