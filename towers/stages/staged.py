"""Cuts a function of a tower for the devices that share it, and orders their turns.

The function's graph is cut into phases, which are functions. The graph of a step calls
them for each micro-batch, each on its stage's device. Nothing but the data, and the
turns of each device, says what waits for what.
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.layers.labels import Labels
from towers.layers.pipeline import Pipeline
from towers.stages.phases import Key, StagePhase, cut
from towers.stages.schedule import Slot, Turn, order


class Staged:
    """A function of a tower, cut into phases, which stages take turns at.

    Attributes:
        inputs: The tensors of its graph that it is called with.
        outputs: Those that it returns.
        turns: What stages compute at once, in an order in which they may.
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
            graph: Its graph.
            inputs: What it is called with.
            outputs: What it returns.
            labels: What its operations were made for.
            pipeline: How the devices of a tower share the model.
            parts: The part of the model that has an input, by the input's key, where
                one has it.
            timed: Whether its phases tell when they end; on a GPU they do not know it.
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
        """Its phases, in the order of one micro-batch."""
        return [phase for phases in self.phases_of for phase in phases]

    def taken_by(self, stage: int) -> list[Key]:
        """Returns the keys of what phases of a stage take, in order, each once."""
        phases = (
            phase
            for turn, phases in zip(self.turns, self.phases_of, strict=True)
            for phase in phases
            if turn.stage == stage
        )
        return [*dict.fromkeys(name for phase in phases for name in phase.takes)]

    def slots(self, micro_batches: int) -> list[Slot]:
        """Returns in which order stages take turns at some micro-batches."""
        return order(self.turns, micro_batches, self._pipeline.schedule)

    def waits(self, slots: Sequence[Slot]) -> list[list[int]]:
        """Returns, for each of some slots, the slots that it has to wait for.

        They are those whose turns it takes something from, and the one before it of its
        stage.
        """
        on_stage: dict[int, int] = {}
        places: dict[tuple[int, int], int] = {}
        waits = []
        for k, slot in enumerate(slots):
            turn = self.turns[slot.turn]
            after = [places[slot.micro_batch, before] for before in turn.after]
            after += [on_stage[turn.stage]] if turn.stage in on_stage else []
            waits.append(after)
            on_stage[turn.stage] = places[slot.micro_batch, slot.turn] = k
        return waits

    def kept(self) -> list[list[tuple[tf.Tensor, int]]]:
        """Returns what the stage of each turn keeps from then on for later turns.

        It is what the turn makes, or takes from another stage, with the index of the
        last turn that needs it. What is handed on to another stage, and is not needed
        again, is left out.
        """
        by_turn = [*zip(self.turns, self.phases_of, strict=True)]
        last = {
            (turn.stage, each): k
            for k, (turn, phases) in enumerate(by_turn)
            for phase in phases
            for each in phase.takes
        }
        known = {(turn.stage, key(t)) for turn in self.turns for t in self.inputs}
        found = []
        for k, (turn, phases) in enumerate(by_turn):
            found.append([])
            for phase in phases:
                for each, tensor in [*phase.takes.items(), *phase.makes.items()]:
                    place = turn.stage, each
                    if place not in known and last.get(place, k) > k:
                        found[-1].append((tensor, last[place]))
                    known.add(place)
        return found


def _turns(phases, stages):
    """Puts together what a stage computes at once; returns turns, and their phases."""
    groups = []
    for phase in phases:
        of = stages[phase.place.part], phase.place.backward
        if not groups or groups[-1][0] != of:
            groups.append((of, {False: [], True: []}))
        groups[-1][1][phase.place.deferred].append(phase)
    # What other stages wait for comes first.
    split = [(*of, *each) for of, both in groups for each in both.items() if each[1]]
    turns, makers = [], {}
    for k, (stage, backward, deferred, mine) in enumerate(split):
        taken = {makers.get(each, k) for phase in mine for each in phase.takes} - {k}
        makers |= {each: k for phase in mine for each in phase.makes}
        duration = max(1.0, sum(phase.work for phase in mine))
        turns.append(Turn(stage, backward, deferred, tuple(sorted(taken)), duration))
    return turns, [mine for *_, mine in split]
