"""Steps that run eagerly: one device of each host computes a batch, op by op."""

import contextlib
from typing import Any

import tensorflow as tf

from towers.builders.common import Pieces
from towers.builders.guarded_step import guarded_step, state_before, steps_done
from towers.builders.train_function import step_function
from towers.collectives import batch
from towers.collectives.world import World
from towers.keras_adapter import optimizers
from towers.keras_adapter.models import COMPUTE_LOSS
from towers.keras_adapter.patching import patched
from towers.layers import tables, variables
from towers.partition.call import Gradients


def run_eagerly(pieces: Pieces, step: str, data: Any) -> Any:
    """Runs a step of a whole batch on the device of home, and returns its results.

    Each host does so; all get the results of the first one.
    """
    context, plan = pieces.context, pieces.context.plan
    model, hosts = context.model, plan.hosts
    line = (
        f"Model '{model.name}' runs its {step} eagerly, so one device computes "
        "all of each batch; towers are for graphs."
    )
    if hosts.count > 1:
        line += f" Each of {hosts.count} hosts does so, and has the first's numbers."
    context.say([line])
    # A tape knows whole variables only, as graphs before may have left none.
    tables.bring_home(model, plan.home_of)
    with context.agreeing_on(step, data):
        if batch.part_of(data) is not None:
            rows, size = batch.rows_given(data), batch.batch_size(data)
            data = plan.gather(rows, size, "batch")
        with tf.device(plan.home):
            results = compute_eagerly(pieces, step, data)
    if hosts.count > 1:
        # Other hosts may have drawn or rounded otherwise.
        pieces.store.follow_first_host()
        results = _of_first_host(hosts, results)
    return results


def compute_eagerly(pieces: Pieces, step: str, data: Any) -> Any:
    """Computes a step of a batch where it is called; the guard looks at gradients."""
    context = pieces.context
    if step != "train_step" or context.guard is None:
        return step_function(context, step)(data)
    model, state = context.model, state_before(context)
    guard = guarded_step(pieces, data, steps_done(context), state)
    losses = []

    def compute_loss(original, called, *args, **kwargs):
        loss = original(called, *args, **kwargs)
        losses.extend([loss] if called is model else ())
        return loss

    def apply(original, optimizer, grads, trainable_variables=None):
        observed = contextlib.nullcontext()
        # A user's optimizer may call others.
        if optimizer in variables.optimizers(model, only_built=False).values():
            gradients = [*grads]
            observed = guard.before(Gradients([gradients], gradients, losses=losses))
        with observed:
            return original(optimizer, grads, trainable_variables)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(COMPUTE_LOSS, compute_loss))
        for method in optimizers.APPLY:
            stack.enter_context(patched(method, apply))
        return step_function(context, step)(data)


def _of_first_host(hosts: World, values: Any) -> Any:
    """Returns the first host's values of a nest; strings stay those of each host."""
    flat = tf.nest.flatten(values, expand_composites=True)
    flat = [None if value is None else tf.convert_to_tensor(value) for value in flat]
    sent = [i for i, t in enumerate(flat) if t is not None and t.dtype != tf.string]
    received = hosts.broadcast([flat[i] for i in sent], "what a step returns")
    for i, value in zip(sent, received, strict=True):
        flat[i] = value
    return tf.nest.pack_sequence_as(values, flat, expand_composites=True)
