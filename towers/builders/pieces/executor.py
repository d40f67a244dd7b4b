"""Runs a tower function on all towers: traced, in eager turns, or as replicas."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.rules import NoRuleError, Rules
from towers.builders import checks
from towers.builders.context import Context
from towers.builders.pieces.batches import LocalBatches
from towers.builders.pieces.comparison import RowComparison
from towers.builders.pieces.reader import Values, VariableReader
from towers.builders.pieces.sizes import TraceSizes
from towers.collectives import batch
from towers.keras_adapter.layers import layers_of
from towers.layers import overwritten
from towers.layers.labels import Labels
from towers.loop import loop
from towers.plan import Plan
from towers.program import words
from towers.stages import table
from towers.stages.staged import StagedTower
from towers.tower import eager
from towers.tower.errors import ModelError, UntraceableError
from towers.tower.passes import TowerResult
from towers.tower.run import (
    TowerCall,
    refuse_stateful,
    run,
    run_in_replica_context,
    without_rows,
)
from towers.tower.traced import Traced

# Above it, the start gets too long if towers are copied into the step's graph: with a
# ResNet-50 and 8 towers by a third, for steps that are 2% faster. See `Traced`.
_MANY_LAYERS = 100


class TowerFunction(NamedTuple):
    """What all towers compute of a batch.

    Attributes:
        function: A function of `tower/passes.py`, its model bound. It takes params,
            state, a local batch, its fraction of the batch, and `extra`.
        rules: The rules that the function reads or follows.
        training: Whether this is a part of training.
        extra: Tensors that all towers get alike.
        inputs: Takes a local batch; returns the model's inputs.
        eagerly: What towers call in eager execution, instead of `function`.
    """

    function: Callable[..., TowerResult]
    rules: Rules
    training: bool = False
    extra: Sequence[Any] = ()
    inputs: Callable[[Any], Any] = lambda local: local
    eagerly: Callable[..., TowerResult] | None = None


class _Batch(NamedTuple):
    """A batch that towers are to run with.

    Attributes:
        whole: The batch, as the data have it: a nest of tensors.
        local: What each tower has of it.
        size: Number of its examples.
        sizes: Of each local batch.
        fractions: Of the global batch, that each local batch is.
        like: A batch as towers see it, whole or local.
    """

    whole: Any
    local: Sequence[Any]
    size: int | tf.Tensor
    sizes: Sequence[int | tf.Tensor]
    fractions: Sequence[tf.Tensor]
    like: Any

    def joined(self, plan: Plan) -> Any:
        """Returns the whole batch, as towers see it."""
        if self.like is self.whole:
            return self.whole
        mine = batch.join(self.local, self.sizes)
        return plan.gather(mine, self.size, "joined")


@dataclasses.dataclass
class TowerExecutor:
    """Runs a tower function on all towers, each with its local batch."""

    context: Context
    reader: VariableReader
    batches: LocalBatches
    comparison: RowComparison

    def run_towers(
        self,
        towers: TowerFunction,
        values: Sequence[Values],
        whole: Any,
        local_batches: Sequence[Any] | None = None,
    ) -> list[TowerResult]:
        """Runs a tower function on all towers, each with its part of a batch.

        Args:
            towers: The function.
            values: The variables' values for each tower.
            whole: The batch to cut: a nest of tensors with one row an example.
            local_batches: What `LocalBatches.place` made of it, if it is there.

        Returns:
            The results of the towers that have rows, or may have some.
        """
        context = self.context
        refuse_stateful(context.model)
        if context.plan.count > 1 and towers.training and context.strict:
            checks.check_variables(context.model)
        data = self._split(whole, local_batches)
        unread = not towers.rules.complete
        if context.model.run_eagerly:
            if context.plan.pipeline.micro_batches > 1:
                self._check_pipeline()
            self._say_eager()
            if unread:
                self._prove(towers, values, data)
            execute = functools.partial(self._take_turns, towers, data.size)
        else:
            execute, values = self._in_graph(towers, values, data)
        calls = [
            self._call(towers, k, values[k], *mine)
            for k, mine in enumerate(
                zip(data.local, data.sizes, data.fractions, strict=True)
            )
        ]

        def everything():
            rows = data.joined(context.plan)
            fraction = tf.ones([], batch.FRACTION)
            return self._call(towers, 0, values[0], rows, data.size, fraction)

        if unread and towers.rules.unread:
            self._check_rows(towers, data)
        return execute(calls, everything)

    def _split(self, whole, local_batches):
        plan = self.context.plan
        # Keras gives arrays to eager steps.
        whole = tf.nest.map_structure(batch.as_tensor, whole)
        size = batch.batch_size(whole)
        sizes = plan.sizes(size)
        fractions = plan.fractions(sizes, size)
        if local_batches is None:
            local_batches = self.batches.place(whole)
        given = self.context.preprocess is None and batch.part_of(whole) is None
        like = whole if given else local_batches[0]
        return _Batch(whole, local_batches, size, sizes, fractions, like)

    def _call(self, towers, k, values, rows, size, fraction):
        arguments = *values, rows, fraction, *towers.extra
        tower = self.context.plan.towers[k]
        return TowerCall(tower.index, tower.device, size, fraction, arguments)

    def _trace(self, towers, values, data, rows=None, xla=False, labels=None):
        specs = [
            *batch.specs(values[0]),
            batch.local_spec(data.like, rows),
            tf.TensorSpec([], batch.FRACTION),
            *batch.specs(towers.extra),
        ]
        # Passes over a gathered loss's towers are merged only where both are copied.
        # And the results of a function come all at once, no gradient before the last.
        weights = self.context.model.trainable_variables
        size = sum(math.prod(each.shape) * 4 for each in weights)
        noinline = (
            len(layers_of(self.context.model)) > _MANY_LAYERS
            and self.context.found.loss_placed != "gathered"
            and not self.context.plan.hosts.overlaps(size)
        )
        on_gpus = self.context.plan.on_gpus
        return Traced(towers.function, specs, xla, noinline, on_gpus, labels)

    def _in_graph(self, towers, values, data):
        """Traces a tower; returns what runs all of them, and the values they take."""
        context = self.context
        xla = context.xla and not context.together
        xla = xla and (towers.training or context.found.compiled)
        sizes = TraceSizes.of(context, data.like, data.size, xla)
        if context.together:
            sizes = sizes.any_size()
        labels = None
        if not context.plan.pipeline.alone:
            self._check_pipeline()
            labels, sizes = Labels(context.plan.pipeline.parts), sizes.any_size()
        trace = functools.partial(self._trace, towers, values, data, labels=labels)
        traced = sizes.trace_first(trace)
        if traced.needs_tables:
            context.found.reads_tables = True
            values = self.reader.read_variables()
            labels = labels and Labels(context.plan.pipeline.parts)
            trace = functools.partial(self._trace, towers, values, data, labels=labels)
            traced = sizes.trace_first(trace)
        self._check_traced(traced, None if sizes.only else towers.rules)
        if labels is not None:
            if towers.training and context.usual_rows:
                self._describe_stages(trace)
            in_stages = self._in_stages
            return functools.partial(in_stages, traced, labels, towers.training), values

        def execute(calls, everything):
            if context.together:
                return self._together(
                    towers.function, traced, calls, everything, data.size
                )
            return run(sizes.trace_all(trace, traced), calls)

        return execute, values

    def _in_stages(self, traced, labels, training, calls, everything):
        """Runs towers stage by stage, each with its micro-batches."""
        del everything
        context, plan = self.context, self.context.plan
        ended = context.timers.tower_in_stages if training else lambda: None
        timed = training and plan.pipeline.stages > 1 and not plan.on_gpus
        pipeline, weights = plan.pipeline, context.variables
        tower = StagedTower(traced, labels, pipeline, weights, timed)
        if labels.enclosed and plan.pipeline.stages > 1:
            line = (
                f"Model '{context.model.name}' calls {', '.join(labels.enclosed)} in a "
                "branch, a loop or a function, of which all is computed on one stage."
            )
            context.say([line])
        largest, count = overwritten.places(context.model), plan.pipeline.micro_batches
        results = []
        for k in range(0, len(calls), count):
            mine = [*enumerate(calls)][k : k + count]
            if busy := [(k, call) for k, call in mine if not call.is_idle]:
                devices = plan.towers[k].devices
                results += tower.run(busy, devices, largest, ended())
        if not results:
            # A host without rows takes part all the same.
            results = run([traced], calls[:1])
        return results

    def _describe_stages(self, trace):
        """Says which layers are on which stage, and what memory they take."""
        context, pipeline = self.context, self.context.plan.pipeline
        if pipeline.placement.kept is not None or pipeline.stages == 1:
            return
        labels = Labels(pipeline.parts)
        # Only where the number of examples is known, all sizes are.
        rows = max(1, context.plan.sizes(context.usual_rows)[0])
        traced = trace(rows=rows, labels=labels)
        tower = StagedTower(traced, labels, pipeline, context.variables)
        kept = table.activation_bytes(tower, pipeline, rows)
        pipeline.placement.kept = kept
        context.say(table.lines(pipeline, kept, rows))

    def _check_pipeline(self):
        context = self.context
        if context.together:
            raise ModelError(
                f"Model '{context.model.name}' has layers that talk to one another "
                "across towers, by synchronized=True, which stages and micro-batches "
                "do not compute at the same time; expected synchronized=False."
            )

    def _say_eager(self):
        context, pipeline = self.context, self.context.plan.pipeline
        if pipeline.stages > 1 or pipeline.recompute != "none":
            line = (
                f"Model '{context.model.name}' runs eagerly, so each tower computes on "
                "its first device, and keeps all that its gradient needs; stages and "
                "recompute are for graphs."
            )
            context.say([line])

    def _together(self, function, traced, calls, everything, total):
        """Runs towers whose layers talk to one another, and to those of other hosts."""
        plan = self.context.plan
        bounds = batch.split_bounds(total, plan.split_ratios)
        sizes = [end - start for start, end in bounds]
        known = isinstance(total, int)
        smallest = min(sizes) if known else tf.reduce_min(tf.stack(sizes))
        return run_in_replica_context(
            function, traced, calls, everything, smallest, plan.hosts
        )

    def _check_traced(self, traced, rules):
        context = self.context
        lines = checks.check_effects(context.model, traced.effects)
        if context.plan.count > 1:
            context.say(lines)
        if rules is not None:
            if context.strict:
                checks.check_coupling(context.model, rules)
            checks.check_outputs(context.model, traced.returned.outputs)

    def _check_rows(self, towers, data):
        # Unless a graph is traced, there are numbers to compare.
        x = None
        if not any(map(tf.is_symbolic_tensor, loop.flat(data.whole))):
            x = towers.inputs(data.joined(self.context.plan))
        spec = batch.local_spec(towers.inputs(data.like), None)
        self.comparison.check_rows(towers.rules, spec, x, towers.training)

    def _prove(self, towers, values, data):
        """Reads the rules of eager towers from a graph, if one can be traced."""
        model = self.context.model
        try:
            with eager.aside(model):
                traced = self._trace(towers, values, data)
        except Exception as error:
            known = isinstance(error, ModelError | NoRuleError)
            if known and not isinstance(error, UntraceableError):
                raise
            said = words.error_sentence(error.__cause__ or error)
            towers.rules.give_up(f"a layer that only Python can run ({said})")
            line = (
                f"Model '{model.name}' cannot be traced as a graph ({said}), so "
                "it is not known whether its layers treat each example by itself. "
                "Towers assume that they do; towers.check_parity shows whether that "
                "is right."
            )
            self.context.say([line])
        else:
            self._check_traced(traced, towers.rules)

    def _take_turns(self, towers, size, calls, everything):
        """Runs towers in plain Python."""
        context = self.context
        turns = eager.Turns(context.model)
        if context.together:
            results = self._together(towers.function, None, calls, everything, size)
            context.say(turns.lines_of_all(len(calls)))
        else:
            turn = functools.partial(turns.take, towers.eagerly or towers.function)
            if not any(call.size for call in calls) and calls[0].index > 0:
                turn = functools.partial(_without_rows, turn)
            results = run([turn] * len(calls), calls)
            context.say(turns.lines())
        context.found.kept = turns.kept() if len(results) > 1 else ""
        if context.plan.count > 1:
            checks.check_results(context.model, results)
        return results


def _without_rows(turn, params, state, rows, fraction, *extra):
    """The turn of a host's tower that has no rows: it is of one that counts nothing.

    Python that is the user's need not be able to compute of none.
    """
    return without_rows(turn(params, state, batch.made_up(rows), fraction, *extra))
