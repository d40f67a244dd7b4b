"""Cuts a function of a tower for the devices that share it, and orders their turns.

The function's graph is cut into phases, which are functions. The graph of a step calls
them for each micro-batch, each on its stage's device. Only the data, and the order of
turns on each device, make one phase wait for another.
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.layers.pipeline import Pipeline
from towers.partition.trace import Labels
from towers.stages.phases import Key, StagePhase, cut
from towers.stages.schedule import Slot, Turn, order


class Staged:
    """A function of a tower, cut into phases, which stages run in turns.

    Attributes:
        inputs: The inputs of the function, tensors of its graph.
        outputs: Its outputs.
        turns: The turns of stages, in an order that the data allow.
        phases_of: The phases of each turn.
    """

    def __init__(
        self,
        graph: tf.Graph,
        inputs: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor],
        labels: Labels,
        pipeline: Pipeline,
        parts: Mapping[Key, int | None] | None = None,
        timed: bool = False,
    ):
        """Cuts the function.

        Args:
            graph: The function's graph.
            inputs: The function's inputs.
            outputs: The function's outputs.
            labels: The layers that its operations were made for.
            pipeline: How the devices of a tower share the model.
            parts: For the key of an input, the part of the model that holds the input,
                if any does.
            timed: Whether phases return the time at which they end; on a GPU they
                cannot.
        """
        self.inputs, self.outputs = inputs, outputs
        phases = cut(
            graph,
            outputs,
            labels,
            {key(tensor): None for tensor in inputs} | {**(parts or {})},
            {key(inside): outside for outside, inside in graph.captures},
            pipeline.recompute != "none",
            pipeline.stages > 1,
            timed,
        )
        self.turns, self.phases_of = _turns(phases, pipeline.stages_of_parts)
        self._pipeline = pipeline

    @property
    def phases(self) -> list[StagePhase]:
        """The phases, in the order of one micro-batch."""
        return [phase for phases in self.phases_of for phase in phases]

    def taken_by(self, stage: int) -> list[Key]:
        """Returns the keys of the inputs of a stage's phases, in order, each once."""
        phases = (
            phase
            for turn, phases in zip(self.turns, self.phases_of, strict=True)
            for phase in phases
            if turn.stage == stage
        )
        return [*dict.fromkeys(name for phase in phases for name in phase.takes)]

    def slots(self, micro_batches: int) -> list[Slot]:
        """Returns the order in which stages take turns at some micro-batches."""
        return order(self.turns, micro_batches, self._pipeline.schedule)

    def waits(self, slots: Sequence[Slot]) -> list[list[int]]:
        """Returns, for each of some slots, the slots that it has to wait for.

        These are the slots of turns that it takes something from, and its stage's slot
        before it.
        """
        on_stage: dict[int, int] = {}
        slot_of: dict[tuple[int, int], int] = {}
        waits = []
        for k, slot in enumerate(slots):
            turn = self.turns[slot.turn]
            after = [slot_of[slot.micro_batch, before] for before in turn.after]
            after += [on_stage[turn.stage]] if turn.stage in on_stage else []
            waits.append(after)
            on_stage[turn.stage] = slot_of[slot.micro_batch, slot.turn] = k
        return waits

    def kept(self) -> list[list[tuple[tf.Tensor, int]]]:
        """Returns the tensors that the stage of each turn keeps for later turns.

        A stage keeps tensors that the turn makes, or takes from another stage. Each
        comes with the index of the last turn that needs it. A tensor that is handed on
        to another stage, and not needed again, is left out.
        """
        by_turn = [*zip(self.turns, self.phases_of, strict=True)]
        last = {
            (turn.stage, name): k
            for k, (turn, phases) in enumerate(by_turn)
            for phase in phases
            for name in phase.takes
        }
        known = {(turn.stage, key(t)) for turn in self.turns for t in self.inputs}
        kept = []
        for k, (turn, phases) in enumerate(by_turn):
            kept.append([])
            for phase in phases:
                for name, tensor in [*phase.takes.items(), *phase.makes.items()]:
                    held = turn.stage, name
                    if held not in known and last.get(held, k) > k:
                        kept[-1].append((tensor, last[held]))
                    known.add(held)
        return kept


def _turns(phases, stages):
    """Groups phases that a stage runs at once; returns turns, and their phases."""
    groups = []
    for phase in phases:
        of = stages[phase.place.part], phase.place.backward
        if not groups or groups[-1][0] != of:
            groups.append((of, {False: [], True: []}))
        groups[-1][1][phase.place.deferred].append(phase)
    # Phases that other stages wait for come first.
    split = [(*of, *group) for of, both in groups for group in both.items() if group[1]]
    turns, makers = [], {}
    for k, (stage, backward, deferred, members) in enumerate(split):
        taken = {makers.get(name, k) for phase in members for name in phase.takes} - {k}
        makers |= {name: k for phase in members for name in phase.makes}
        duration = max(1.0, sum(phase.work for phase in members))
        turns.append(Turn(stage, backward, deferred, tuple(sorted(taken)), duration))
    return turns, [members for *_, members in split]
