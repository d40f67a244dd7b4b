"""Says what a step on towers does otherwise than it would on one device."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from towers.analysis import effects
from towers.builders import specs
from towers.builders.common import Pieces
from towers.builders.context import Context
from towers.collectives import batch
from towers.layers import sharded, variables
from towers.partition.partitioned import Partitioned
from towers.program.features import feature


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Notes and says what is so of a partitioned step; each line is said once.

    Attributes:
        context: The builder's.
        step: The name of the step, such as "train_step".
        partitioned: The step.
        stand_ins: The `id`s of handles that stand in for variables of the model.
    """

    context: Context
    step: str
    partitioned: Partitioned
    stand_ins: Collection[int] = ()

    def note(self) -> None:
        """Notes what is so of a step of training; see `ModelFacts`."""
        gathered, facts = self.partitioned.placement.gathered, self.context.facts
        facts.loss_placed = "gathered" if gathered else "tower"
        facts.unseeded = self._unseeded_draws()
        facts.unsaved = self._unsaved_variables()

    def say(self, lines: Sequence[str]) -> None:
        """Says some lines of the step, and what else is so of this one."""
        context, step, partitioned = self.context, self.step, self.partitioned
        execution, trace = context.execution(step), partitioned.trace
        name = step_name(context, step)
        context.say(lines)
        if execution.towers_by_xla:
            context.say(partitioned.by_xla(name))
        if execution.updates_by_xla:
            context.say(partitioned.updated(name[0].lower() + name[1:]))
        if context.guard is not None and trace.reads_gradients:
            context.say([f"{name} has gradients that check_numerics does not see."])
        if unseeded := self._unseeded_draws():
            context.say([f"{name} {words_of_draws(unseeded)}."])
        if context.plan.pipeline.stages > 1 and trace.labels.enclosed:
            line = (
                f"Model '{context.model.name}' calls "
                f"{', '.join(trace.labels.enclosed)} in a branch or a loop, of "
                "which all is computed on one stage."
            )
            context.say([line])
        if step == "train_step" and (unsaved := self._unsaved_variables()):
            names = ", ".join(sorted(variable.name for variable in unsaved))
            line = (
                f"{name} changes {names}, which no attribute of the "
                "model or of its layers holds, so that checkpoints do not contain "
                "it; make it an attribute."
            )
            context.say([line])

    def _unseeded_draws(self):
        """Returns phrases: where random numbers are drawn of no state of the model."""
        if self.context.preprocess is not None:
            # It may draw by `tf.random`.
            return []
        names = sorted(variable.name for variable in self._unsaved_variables())
        of_keras = [f" by {name}" for name in names if "seed_generator" in name]
        return [*self.partitioned.stateful_draws, *of_keras]

    def _unsaved_variables(self):
        """Returns the variables that the step changes, and nobody saves."""
        model, trace = self.context.model, self.partitioned.trace
        saved = {*self.stand_ins}
        for variable in variables.of(model):
            saved |= {id(value.handle) for value in sharded.places(variable)}
        saved |= {id(variable.handle) for variable in variables.plain(model).values()}
        changed = effects.changed(trace.graph) - saved
        used = {id(variable.handle): variable for variable in trace.concrete.variables}
        return [variable for handle, variable in used.items() if handle in changed]


def step_name(context: Context, step: str) -> str:
    """Returns what a sentence calls a step of the model, at its begin."""
    return f"The {step} of model '{context.model.name}'"


def words_of_draws(phrases: Sequence[str]) -> str:
    """Says of a step where it draws random numbers without a seed, in phrases."""
    return (
        f"draws random numbers without a seed{','.join(phrases)}, so that no run can "
        "repeat them; expected those of keras.random, with a keras.random.SeedGenerator"
    )


def describe_stages(pieces: Pieces, partitioned: Partitioned, data: Any) -> None:
    """Says once which layers are on which stage, and what memory they take.

    Args:
        pieces: The pieces of the builder.
        partitioned: The step of training.
        data: A batch, or its `tf.TypeSpec`s; if its size is not known, nothing is said.
    """
    context, pipeline = pieces.context, pieces.context.plan.pipeline
    first, *_ = tf.nest.flatten(batch.specs(data))
    placement, size = pipeline.placement, context.usual_rows or first.shape[0]
    if pipeline.stages == 1 or placement.kept is not None or not size:
        return
    rows, table = specs.usual_rows(context, data), feature("stages.table")
    placement.kept = table.activation_bytes(partitioned.staged(rows), pipeline, rows)
    context.say(table.lines(pipeline, placement.kept, rows))
