"""Runs a tower on several devices, or by several micro-batches, in one graph.

A tower is traced once, as any. Its graph is cut into phases, which are functions; the
graph of a step calls them for each micro-batch, each on its stage's device. Nothing but
the data, and the turns of each device, says what waits for what.
"""

import collections
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.collectives import reduce
from towers.layers import overwritten
from towers.layers.labels import Labels
from towers.layers.pipeline import Pipeline
from towers.stages.phases import Phase, cut
from towers.stages.schedule import Turn, order
from towers.tower.passes import TowerResult
from towers.tower.run import TowerCall, without_auto_control_deps
from towers.tower.traced import Traced, with_shape_of


class StagedTower:
    """A traced tower, cut into phases.

    Attributes:
        traced: The whole of it.
        turns: What stages compute at once, in the same order.
    """

    def __init__(
        self,
        traced: Traced,
        labels: Labels,
        pipeline: Pipeline,
        weights: Sequence[Any],
        timed: bool = False,
    ):
        """Cuts a tower.

        Args:
            traced: The tower. It takes values of variables first.
            labels: What its operations were made for.
            pipeline: How its devices share the model.
            weights: The variables, in the order in which it takes their values.
            timed: Whether its phases tell when they end; on a GPU they do not know it.
        """
        self.traced, self._pipeline = traced, pipeline
        graph, self._takes = traced.graph, traced.inputs
        parts = pipeline.parts_of(weights)
        taken = [key(tensor) for tensor in self._takes]
        with_weights = (
            part
            for part, spec in zip(parts, tf.nest.flatten(traced.specs), strict=False)
            if spec is not None
        )
        given = dict.fromkeys(taken) | dict(zip(taken, with_weights, strict=False))
        self._returned = tf.nest.flatten(traced.returned, expand_composites=True)
        made = cut(
            graph,
            [tensor for tensor in self._returned if tensor is not None],
            labels,
            given,
            {key(inside): outside for outside, inside in graph.captures},
            pipeline.recompute != "none",
            pipeline.stages > 1,
            timed,
        )
        self.turns, self._phases = _turns(made, pipeline.stages_of_parts)

    @property
    def phases(self) -> list[Phase]:
        """Its phases, in the order of one micro-batch."""
        return [phase for phases in self._phases for phase in phases]

    def kept(self) -> list[list[tuple[tf.Tensor, int]]]:
        """Returns what the stage of each turn keeps from then on for later turns.

        It is what the turn makes, or takes from another stage, with the index of the
        last turn that needs it. What is handed on to another stage, and is not needed
        again, is left out.
        """
        by_turn = [*zip(self.turns, self._phases, strict=True)]
        last = {
            (turn.stage, each): k
            for k, (turn, phases) in enumerate(by_turn)
            for phase in phases
            for each in phase.takes
        }
        known = {(turn.stage, key(t)) for turn in self.turns for t in self._takes}
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

    def run(
        self,
        calls: Sequence[tuple[int, TowerCall]],
        devices: Sequence[str],
        largest: Collection[int] = (),
        ended: Callable[..., None] | None = None,
    ) -> list[TowerResult]:
        """Adds the turns of one tower's micro-batches to the graph being built.

        Args:
            calls: What each micro-batch is to compute, with the number of its tower.
            devices: That of each stage.
            largest: Places of gradients of which the largest is taken, and no sum.
            ended: Is told of each turn, in order: its stage, the turns that it had to
                wait for, what it has made, and when, if that is known.

        Returns:
            The results of the micro-batches. The first one has the gradients of all.
        """
        returned, count = self.traced.returned, self._pipeline.micro_batches
        step = _Step(returned, calls, devices, {*largest}, count)
        for micro_batch, (_, call) in enumerate(calls):
            values = tf.nest.flatten([*call.arguments], expand_composites=True)
            step.give(micro_batch, self._takes, [v for v in values if v is not None])
        with without_auto_control_deps(self.traced.graph.variables):
            slots = order(self.turns, len(calls), self._pipeline.schedule)
            on_stage, places = {}, {}
            for k, slot in enumerate(slots):
                m, turn = slot.micro_batch, self.turns[slot.turn]
                for phase in self._phases[slot.turn]:
                    made, end = step.add(m, turn.stage, phase)
                if ended is not None:
                    after = [places[m, before] for before in turn.after]
                    after += [on_stage[turn.stage]] if turn.stage in on_stage else []
                    ended(turn.stage, after, made[:1], end)
                on_stage[turn.stage] = places[m, slot.turn] = k
        return step.results()


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


class _Step:
    """A tower's part of the graph of a step, as far as it is built."""

    def __init__(self, returned, calls, devices, largest, micro_batches):
        self._returned, self._calls, self._devices = returned, calls, devices
        self._count = micro_batches
        # By key, each dense gradient's sum so far. Those of 16 bits are added in 32.
        self._sums = {
            key(gradient): None
            for i, gradient in enumerate(returned.gradients)
            if isinstance(gradient, tf.Tensor) and i not in largest
        }
        self._largest = largest
        self._made = [{} for _ in calls]
        self._last = collections.defaultdict(list)

    def give(self, micro_batch, takes, values):
        """Is given what a micro-batch's tower is called with."""
        self._made[micro_batch].update(zip(map(key, takes), values, strict=True))

    def add(self, micro_batch, stage, phase):
        """Adds a phase of a micro-batch."""
        k, call = self._calls[micro_batch]
        made = self._made[micro_batch]
        # The first of all towers always has an example, unless there is none at all.
        known = call.index == 0 or isinstance(call.size, int)
        with (
            tf.name_scope(self._scope(k, stage)),
            tf.device(self._devices[stage]),
            tf.control_dependencies(self._last[stage]),
        ):
            values, end = phase(
                [made[each] for each in phase.takes], None if known else call.size
            )
            if values:
                self._last[stage] = [values[0].op]
            for each, value in zip(phase.makes, values, strict=True):
                if each in self._sums:
                    self._add(each, value)
                else:
                    made[each] = value
        return values, end

    def _scope(self, k, stage):
        """Where TensorBoard shows it; the end of the name has no number added."""
        part = f"/micro_batch_{k % self._count}" if self._count > 1 else ""
        return f"tower_{k // self._count}{part}/stage_{stage}/"

    def _add(self, gradient, value):
        before = self._sums[gradient]
        if len(self._calls) > 1 and value.dtype.size < 4:
            value = tf.cast(value, tf.float32)
        self._sums[gradient] = value if before is None else before + value

    def results(self):
        """Returns what the micro-batches have made."""
        results = []
        for (k, call), made in zip(self._calls, self._made, strict=True):

            def of(tensor, made=made):
                return None if tensor is None else made.get(key(tensor))

            result = tf.nest.map_structure(of, self._returned, expand_composites=True)
            about = {"size": call.size, "fraction": call.fraction, "tower": k}
            results.append(result._replace(**about))
        gradients = [
            self._gradient(i, like, [result.gradients[i] for result in results])
            for i, like in enumerate(self._returned.gradients)
        ]
        first, *others = results
        others = [result._replace(gradients=()) for result in others]
        return [first._replace(gradients=gradients), *others]

    def _gradient(self, i, like, found):
        """The gradient of all micro-batches, also where it was not added as it came."""
        if like is None:
            return None
        if isinstance(like, tf.Tensor) and key(like) in self._sums:
            return tf.cast(self._sums[key(like)], like.dtype)
        found = [with_shape_of(gradient, like) for gradient in found]
        parts = tf.nest.flatten(found[0], expand_composites=True)
        with tf.device(parts[0].device):
            return (
                overwritten.largest(found) if i in self._largest else reduce.add(found)
            )
