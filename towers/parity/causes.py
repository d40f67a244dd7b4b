"""Finds out why towers differ from one device: by trying, not by guessing."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.builders.steps import words_of_draws
from towers.collectives import batch
from towers.keras_adapter.layers import has_training_argument, layers_of, own_variables
from towers.parity.report import (
    DIFFERS,
    ROUNDING,
    Row,
    compare,
    difference,
    differences,
    is_equal,
)
from towers.parity.trials import (
    DISTURBANCES,
    Setting,
    Trials,
    attribute,
)
from towers.tower.errors import ModelError

# Names in a sentence.
_NAMED = 3


def judge(trials: Trials, setting: Setting) -> tuple[Row, ...]:
    """Compares towers with one device: a row for each thing compared."""
    theirs = list(trials.on_one_device(setting))
    rounding = _rounding(trials, setting)
    found = trials.agreed(differences(trials.on_towers(setting), theirs))
    rows = compare(theirs, found, rounding, trials.tolerance)
    for disturbance in DISTURBANCES:
        if is_equal(rows):
            break
        # Rounding may have carried the input of a ReLU over zero in this run only. What
        # is more than rounding is there in any.
        again = differences(trials.on_towers(setting, disturbance), theirs)
        again = trials.agreed(again)
        found = list(map(min, found, again))
        rows = compare(theirs, found, rounding, trials.tolerance)
    return rows


def _rounding(trials, setting):
    """What rounding changes in each entry; nothing where that cannot be told."""
    random = trials.random_layers
    found = trials.rounding(setting._replace(silent=bool(random)))
    # Before the first update nothing has amplified it yet. What is large there is the
    # model's own: it draws noise that cannot be silenced.
    if found[0] > 10 * trials.tolerance or not all(map(has_training_argument, random)):
        return [0.0] * len(found)
    return found


def explain(trials: Trials, rows: Sequence[Row]) -> Iterator[str]:
    """Says in sentences why towers differ from one device.

    `rows` are what the comparison found.
    """
    if trials.unseeded:
        yield f"The train_step {words_of_draws(trials.unseeded)}."
        return
    silent = any(map(has_training_argument, trials.random_layers))
    every = Setting(bool(trials.batch_norms), silent)
    if any(every):
        try:
            rows = judge(trials, every)
        except ModelError as error:
            yield f"Could not try {_in_words(trials, every)}: {error}"
        else:
            if is_equal(rows):
                yield from _by_design(trials, every, rows)
                return
            yield f"Some of it remains {_in_words(trials, every)}."
    yield from list(_mixing(trials)) or _unknown(trials, rows)


def _by_design(trials, every, rows):
    """Which of the known kinds of layers it takes to explain all."""
    needed = every
    for alone in [Setting(alike=True), Setting(silent=True)] * all(every):
        found = judge(trials, alone)
        if is_equal(found):
            needed, rows = alone, found
            break
    in_parts = trials.plan.pipeline.micro_batches > 1
    if needed.alike and trials.plan.count == 1:
        # It normalises the whole batch, as one device does.
        yield (
            "Differs by rounding: a tower computes BatchNormalization by other kernels "
            f"than Keras ({_names(trials.batch_norms)})."
        )
    elif needed.alike:
        normalises = "each local batch by itself"
        if in_parts:
            normalises = (
                "each micro-batch by its own statistics, as a tower does, and its "
                "moving averages take their mean, weighted by examples"
            )
        yield (
            f"Differs by design: BatchNormalization normalises {normalises} "
            f"({_names(trials.batch_norms)})."
        )
    if needed.silent:
        where = "for each micro-batch" if in_parts else "on each tower"
        yield (
            f"Differs by design: random layers draw differently {where} "
            f"({_names(trials.random_layers)})."
        )
    most = max(rows, key=lambda row: row.difference)
    sensitive = sum(row.verdict == ROUNDING for row in rows)
    how = f"(at most {most.difference:.1e})"
    if sensitive:
        how = (
            f"({sensitive} of {len(rows)} values are sensitive to rounding. The "
            f"largest difference is {most.difference:.1e}, in {most.kind} {most.name}. "
            f"One device differs there by {most.rounding:.1e} from itself, if its "
            "first weights are rounded otherwise)"
        )
    yield f"Tried {_in_words(trials, needed)}, all is equal {how}."


def _in_words(trials, setting):
    batch_norm = "synchronized=True on BatchNormalization"
    if not trials.plan.pipeline.alone:
        batch_norm = "BatchNormalization by its moving averages"
    parts = [batch_norm] * setting.alike
    parts += ["random layers silenced"] * setting.silent
    return f"with {' and '.join(parts)}"


def _unknown(trials, rows):
    differing = {
        id(variable)
        for kind, variables in (
            ("variable", trials.model.trainable_variables),
            ("state", trials.model.non_trainable_variables),
        )
        for variable, row in zip(
            variables, (row for row in rows if row.kind == kind), strict=True
        )
        if row.verdict == DIFFERS
    }
    layers = [
        layer
        for layer in layers_of(trials.model)
        if any(id(variable) in differing for variable in own_variables(layer))
    ]
    if layers:
        what = f"the first layers whose variables differ are {_names(layers)}"
    else:
        names = [f"{row.kind} {row.name}" for row in rows if row.verdict == DIFFERS]
        what = f"the variables are equal, but {', '.join(names[:_NAMED])} differ"
    yield f"Differs, cause unknown: {what}."
    stubborn = [x for x in trials.random_layers if not has_training_argument(x)]
    if stubborn:
        yield (
            f"Random layers without a training argument ({_names(stubborn)}) cannot be "
            "silenced, so whether they are the cause cannot be tried."
        )


def _names(layers):
    names = [layer.name for layer in layers]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


# Layers that look at several examples at once.


def _mixing(trials):
    """Names layers whose outputs for a local batch depend on the other ones."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(trials.batches[0])
    bounds = batch.split_bounds(int(batch.batch_size(x)), trials.plan.split_ratios)
    # These differ anyway, and so does what they are part of.
    known = {id(layer) for layer in [*trials.batch_norms, *trials.random_layers]}
    layers = [
        layer
        for layer in layers_of(trials.model)
        if known.isdisjoint(map(id, layers_of(layer)))
    ]
    found = _call_in_parts(trials.model, x, layers, bounds)
    mixing = {key for key, gap in found.items() if gap > 10 * trials.tolerance}
    for layer in layers:
        parts = map(id, layers_of(layer, include_self=False))
        if id(layer) in mixing and mixing.isdisjoint(parts):
            yield (
                f"Layer '{layer.name}' mixes the examples of a batch: called with each "
                "local batch by itself, its outputs differ by "
                f"{found[id(layer)]:.1e}."
            )


def _call_in_parts(model, x, layers, bounds):
    """Calls the model, and each layer also with the local batches of its own inputs.

    Returns:
        For the id of each layer that was called, the difference between its outputs.
    """
    found = {}
    busy = []

    def probed(layer):
        call = layer.call

        @functools.wraps(call)
        def wrapper(*args, **kwargs):
            outputs = call(*args, **kwargs)
            # Not the parts of a layer that is being called with local batches.
            if id(layer) not in found and not busy:
                busy.append(layer)
                found[id(layer)] = _difference_of_parts(
                    call, (args, kwargs), outputs, bounds
                )
                busy.pop()
            return outputs

        return wrapper

    with contextlib.ExitStack() as stack:
        stack.enter_context(keras.StatelessScope(collect_losses=True))
        for layer in layers:
            stack.enter_context(attribute(layer, "call", probed(layer)))
        model(x, **({"training": True} if has_training_argument(model) else {}))
    return found


def _difference_of_parts(call, arguments, outputs, bounds):
    """Calls with the rows of each local batch, and compares the joined outputs."""
    total = bounds[-1][1]

    def rows(tensor, start, end):
        sized = isinstance(tensor, tf.Tensor) and tensor.shape.rank
        return tensor[start:end] if sized and tensor.shape[0] == total else tensor

    parts = []
    for start, end in bounds:
        if end > start:
            args, kwargs = tf.nest.map_structure(
                functools.partial(rows, start=start, end=end), arguments
            )
            try:
                parts.append(tf.nest.flatten(call(*args, **kwargs)))
            except (ValueError, tf.errors.InvalidArgumentError):
                return 0.0  # It takes no other size, so that nothing can be said.
    gaps = [
        difference(np.concatenate(found), np.asarray(output, np.float64))
        for output, *found in zip(tf.nest.flatten(outputs), *parts, strict=True)
        if isinstance(output, tf.Tensor) and output.shape.rank
    ]
    return max(gaps, default=0.0)
