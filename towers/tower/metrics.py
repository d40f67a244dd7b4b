"""What a local batch adds to the variables of metrics.

Nearly all metrics add up: a batch adds to their variables what its parts add. So each
tower updates the metrics from nothing, and home adds up the changes; no output travels.
Whether a metric adds up is read from the graph of its update, or known for Keras's own
(`trust.py`).
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.analysis import effects
from towers.analysis.kinds import Dependence
from towers.analysis.layer_calls import key
from towers.analysis.rules import ADDED_UP, NoRuleError, Rules
from towers.analysis.trust import is_additive
from towers.keras_adapter.models import compiled_metrics
from towers.layers import fused
from towers.program import words


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of a model's compiled metrics, each once."""
    metrics = compiled_metrics(model)
    found = [] if metrics is None else [v for m in metrics.metrics for v in m.variables]
    return [*{id(variable): variable for variable in found}.values()]


def changes(
    model: keras.Model, rules: Rules, y: Any, outputs: Any, sample_weight: Any
) -> list[tf.Tensor | None]:
    """Computes what a local batch adds to the variables of the compiled metrics.

    Args:
        model: A compiled model; nothing is assigned.
        rules: Learn how the changes of all towers combine, as "metric 0" and so on; see
            `refused`.
        y: The targets as they were given, before any preprocessing.
        outputs: The model's outputs.
        sample_weight: The weights, or `None`.

    Returns:
        A change for each of `variables_of`, `None` for what stays as it is.

    Raises:
        NoRuleError: While tracing, if a metric does more than to update its variables;
            home then computes the loss and all metrics.
    """
    variables = variables_of(model)
    if not variables:
        return []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    nothing = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
    scope = keras.StatelessScope([*zip(variables, nothing, strict=True)])
    try:
        with scope, fused.argmax():
            compiled_metrics(model).update_state(y, outputs, sample_weight)
    except (TypeError, ValueError, NotImplementedError) as error:
        # With an unknown number of rows it fails; home knows their number.
        for i in range(len(variables)):
            said = words.error_sentence(error)
            rules.lay_down(f"metric {i}", Dependence.UNKNOWN, said)
        return [None] * len(variables)
    if scope.state_mapping.keys() - {id(v) for v in variables_of(model)}:
        # Such as the state of a seed generator: home assigns it, once.
        raise NoRuleError(
            "a variable that a metric assigns, and that is none of its own"
        )
    found = [scope.get_current_value(variable) for variable in variables]
    if not rules.complete:
        made = graph.get_operations()[before:]
        ranks = [output.shape.rank for output in tf.nest.flatten(outputs)]
        _read(model, rules, ranks, variables, nothing, found, made)
    return [
        None if new is old else new for old, new in zip(nothing, found, strict=True)
    ]


def refused(model: keras.Model, rules: Rules) -> dict[keras.metrics.Metric, str]:
    """Returns the compiled metrics whose changes do not add up, and why.

    Metrics are told apart by identity.
    """
    metrics = compiled_metrics(model)
    places = {id(v): i for i, v in enumerate(variables_of(model))}
    found = {}
    for metric in [] if metrics is None else metrics.metrics:
        for variable in metric.variables:
            name = f"metric {places[id(variable)]}"
            if rules[name] not in (None, *ADDED_UP):
                found[metric] = rules.reasons.get(name, "its outputs")
    return found


def _read(model, rules, ranks, variables, nothing, found, made):
    # Which metric's they are, the graph does not tell.
    all_effects = [*effects.of(made)]
    for effect in all_effects:
        if effect.type not in effects.REPEATED:
            raise NoRuleError(f"a metric's {effect}")
    effect = next(iter(all_effects), None)
    inside = {op.name for op in made}
    trusted = {
        id(variable)
        for metric in compiled_metrics(model).metrics
        if is_additive(metric, ranks)
        for variable in metric.variables
    }
    olds = {key(old) for old in nothing}
    for i, (variable, old, new) in enumerate(
        zip(variables, nothing, found, strict=True)
    ):
        if new is old:
            continue
        name = f"metric {i}"
        if effect is None:
            rules.change(name, _addends(new, old, olds, inside))
        else:
            rules.change(name, None, f"a metric's {effect.type}")
        # Of Keras's own, even where its graph cannot be read.
        unknown = rules[name] is Dependence.UNKNOWN
        if unknown and id(variable) in trusted and rules.apart:
            rules.lay_down(name, Dependence.SUM)


def _addends(
    new: tf.Tensor, old: tf.Tensor, olds: set, inside: set
) -> Sequence[tf.Tensor] | None:
    """What was added to a value, if nothing else was done to it."""
    if new is old:
        return []
    op = new.op
    if op.type == "Identity":
        return _addends(op.inputs[0], old, olds, inside)
    if op.type not in ("Add", "AddV2"):
        return None
    for value, added in (op.inputs, op.inputs[::-1]):
        if not _depends(added, olds, inside):
            before = _addends(value, old, olds, inside)
            return None if before is None else [*before, added]
    return None


def _depends(tensor: tf.Tensor, olds: set, inside: set) -> bool:
    """Whether operations of the update have made a tensor of old values."""
    waiting, seen = [tensor], set()
    while waiting:
        current = waiting.pop()
        if key(current) in olds:
            return True
        if current.op.name in inside and current.op.name not in seen:
            seen.add(current.op.name)
            waiting.extend(current.op.inputs)
    return False
