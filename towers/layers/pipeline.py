"""The stages of a tower: the device of each layer, and the schedule.

A stage is a part of a model that has a device of its own. A layer that is called twice
stays on its stage. An unplaced layer without weights runs on the stage of its inputs.
"""

import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

from towers.keras_adapter.optimizers import slots_of
from towers.layers import sharded
from towers.program import words

# Returns variables of a built model.
OfModel = Callable[[keras.Model], Iterable[keras.Variable]]
SCHEDULES = ("1f1b", "gpipe")
RECOMPUTE = ("none", "stage", "layer")


def _none(model: keras.Model) -> Iterable[keras.Variable]:
    return ()


class LayerPlacement:
    """The stage of each layer, as requested or balanced.

    Attributes:
        model: The model.
        stages: Number of stages.
        balanced: Whether layers are still to be divided by their measured times.
        kept: The most bytes of activations that each stage keeps; `None` until the
            stages have been reported.
    """

    def __init__(
        self,
        model: keras.Model | None = None,
        stages: int = 1,
        asked: str | Mapping[str, int] = "auto",
        layers: Mapping[int, int] | None = None,
        apart: OfModel = _none,
    ):
        """Places nothing yet.

        Args:
            model: See the attributes.
            stages: See the attributes.
            asked: Stages by regular expressions for names of layers, or "auto".
            layers: The stage of each layer, by its `id`, if known.
            apart: Returns variables on the devices of all stages, such as tables.
        """
        self.model, self.stages = model, stages
        self.balanced = asked == "auto" and stages > 1
        self.kept: Sequence[int] | None = None
        self._asked, self._layers, self._apart = asked, layers, apart

    @property
    def layers(self) -> Mapping[int, int]:
        """The stage of each placed layer, by its `id`; the model is built.

        Raises:
            ValueError: The requested placement does not fit the model.
        """
        if self._layers is None:
            if self._asked == "auto":
                self._layers = balanced(self.model, self.stages, apart=self._apart)
            else:
                self._layers = placed(self.model, self._asked, self.stages)
        return self._layers

    def balance(self, seconds: Sequence[float]) -> None:
        """Divides the layers again, by the time that each layer with weights takes."""
        self._layers = balanced(self.model, self.stages, seconds, self._apart)

    def keeps_all(self) -> None:
        """Makes all variables stay with their layers, including those of `apart`."""
        if self._apart is not _none and self._asked == "auto":
            self._layers = None
        self._apart = _none


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How the devices of a tower share the model.

    Attributes:
        stages: Number of devices of a tower.
        micro_batches: Parts of a tower's batch that go through the stages.
        schedule: "gpipe": all micro-batches forward, then all backward (Huang et al.
            2019). "1f1b": a micro-batch goes backward as soon as it can, so a stage
            holds the activations of few micro-batches (PipeDream-Flush, Narayanan et
            al. 2021).
        recompute: The activations that are recomputed for the gradient: see
            `RECOMPUTE`.
        placement: The stage of each layer.
    """

    stages: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    placement: LayerPlacement = dataclasses.field(default_factory=LayerPlacement)

    @property
    def alone(self) -> bool:
        """Whether a tower computes its whole batch at once, on one device."""
        return self.stages == 1 and self.micro_batches == 1 and self.recompute == "none"

    @property
    def layers(self) -> Mapping[int, int]:
        """The stage of each placed layer; see `LayerPlacement.layers`."""
        if self.stages == 1 and self.recompute != "layer":
            return {}
        return self.placement.layers

    @property
    def model(self) -> keras.Model | None:
        """The model."""
        return self.placement.model

    def of_one_stage(self) -> "Pipeline":
        """Returns a pipeline of one stage with the same micro-batches."""
        return Pipeline(micro_batches=self.micro_batches)

    @property
    def stage_of(self) -> Callable[[keras.Variable], int]:
        """A function that returns the stage of a variable.

        A weight is on the stage of its layer, and an optimizer's slot on that of its
        weight. All other variables, such as a metric's, are on the last stage. The
        function knows the variables that exist now; to look up many variables, get it
        once.
        """
        last = self.stages - 1
        if self.stages == 1 or not self.model.built:
            return lambda variable: last
        stages = self._of_weights(self.layers)
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            for weight in self.model.trainable_variables:
                for slot in slots_of(optimizer, weight, of_any_shape=True):
                    stages[id(slot)] = stages.get(id(weight), last)
        return lambda variable: stages.get(id(variable), last)

    @property
    def parts(self) -> dict[int, int]:
        """The part of each placed layer, by its `id`; see `stages/phases.py`.

        The part is the layer's stage. If layers are recomputed one by one, each layer
        is a part.
        """
        if self.recompute != "layer":
            return dict(self.layers)
        in_order = sorted(self.layers, key=self.layers.get)
        return {layer: part for part, layer in enumerate(in_order)}

    @property
    def stages_of_parts(self) -> list[int]:
        """The stage of each part."""
        if self.recompute != "layer":
            return [*range(self.stages)]
        return sorted(self.layers.values())

    @property
    def parts_of_handles(self) -> dict[int, int]:
        """The part of each weight of the model, by the `id` of its handle."""
        parts = self._of_weights(self.parts)
        return {
            id(variable.handle): parts[id(weight)]
            for layer in placeable(self.model)
            for weight in layer.weights
            if id(weight) in parts
            for variable in sharded.places(weight)
        }

    def _of_weights(self, of_layers):
        return {
            id(weight): of_layers[id(layer)]
            for layer in placeable(self.model)
            if id(layer) in of_layers
            for weight in layer.weights
        }


ONE_STAGE = Pipeline()


def placeable(model: keras.Model | None) -> Iterator[keras.layers.Layer]:
    """Yields the layers that may be placed: the model's, and those of nested models."""
    for layer in getattr(model, "layers", ()):
        if isinstance(layer, keras.layers.InputLayer):
            continue
        if isinstance(layer, keras.Model) and layer.layers:
            yield from placeable(layer)
        else:
            yield layer


def placed(
    model: keras.Model, placement: Mapping[str, int], stages: int
) -> dict[int, int]:
    """Returns the stage of each layer that a placement names, by its `id`.

    Args:
        model: A built model.
        placement: Stages by regular expressions for names of layers; the first that
            matches a full name counts.
        stages: Number of stages.

    Raises:
        ValueError: A layer with weights has no stage, a stage has no layer, or an
            expression is wrong.
    """
    stage_of, unmatched = {}, []
    for pattern, stage in placement.items():
        check_place(pattern, stage, stages)
    layers = [*placeable(model)]
    for layer in layers:
        # A layer that is not built has no path.
        names = (layer.name, getattr(layer, "path", None) or layer.name)
        for pattern, stage in placement.items():
            if any(re.fullmatch(pattern, name) for name in names):
                stage_of[id(layer)] = stage
                break
        else:
            if layer.weights:
                unmatched.append(layer.name)
    if unmatched:
        raise ValueError(
            f"Received a placement that names no stage for {_listed(unmatched)}; "
            "expected one for each layer that has weights, so add them."
        )
    for stage in range(stages):
        if stage not in stage_of.values():
            raise ValueError(
                f"Received a placement that puts no layer on stage {stage} of "
                f"{stages}; expected one at least, of "
                f"{_listed([layer.name for layer in layers])}."
            )
    return stage_of


def weighted(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers to divide among stages: those with weights, in order."""
    return [layer for layer in placeable(model) if layer.weights]


def balanced(
    model: keras.Model,
    stages: int,
    seconds: Sequence[float] | None = None,
    apart: OfModel = _none,
) -> dict[int, int]:
    """Divides layers, in their order, among stages.

    No stage has more than 1.05 times the weights of the largest stage in the most equal
    division. Among these divisions, the slowest stage is as fast as possible.

    Args:
        model: A built model.
        stages: Number of stages.
        seconds: The time of each of the `weighted` layers; by default in proportion to
            its weights.
        apart: Returns variables on the devices of all stages, which do not count.

    Returns:
        The stage of each `weighted` layer, by its `id`.

    Raises:
        ValueError: The model has fewer such layers than stages.
    """
    layers = weighted(model)
    if len(layers) < stages:
        raise ValueError(
            f"Received stages={stages} for the model '{model.name}', which has "
            f"{words.count(len(layers), 'layer')} with weights; expected at least as "
            "many layers."
        )
    skipped = {*map(id, apart(model))}
    sizes = [
        sum(math.prod(v.shape) for v in layer.weights if id(v) not in skipped)
        for layer in layers
    ]
    ends = best_cut(sizes, stages)
    if seconds is not None:
        pieces = zip([0, *ends], ends, strict=False)
        most = 1.05 * max(sum(sizes[start:end]) for start, end in pieces)
        ends = best_cut(seconds, stages, sizes, most)
    return {
        id(layer): sum(k >= end for end in ends[:-1]) for k, layer in enumerate(layers)
    }


def best_cut(
    costs: Sequence[float],
    stages: int,
    sizes: Sequence[float] = (),
    most: float = math.inf,
) -> list[int]:
    """Cuts a list so that the largest sum of a piece is as small as possible.

    Among the optimal cuts, it returns the one with the most equal pieces: with the
    smallest sum of squares.

    >>> best_cut([5, 1, 1, 1, 4], 2)
    [2, 5]

    Args:
        costs: Nonnegative numbers, at least as many as stages.
        stages: Number of pieces, none of them empty.
        sizes: Other numbers, as many.
        most: The largest sum of the sizes of a piece.

    Returns:
        The end of each piece.
    """
    before = [0, *itertools.accumulate(costs)]
    sized = [0, *itertools.accumulate(sizes or [0] * len(costs))]

    def cost(start, end):
        fits = sized[end] - sized[start] <= most
        return before[end] - before[start] if fits else math.inf

    largest, _ = _least(cost, max, len(costs), stages)

    def square(start, end):
        piece_cost = cost(start, end)
        return piece_cost**2 if piece_cost <= largest else math.inf

    return _least(square, operator.add, len(costs), stages)[1]


def _least(cost, combine, count, stages):
    """Returns the least combined cost of pieces, and the ends of these pieces."""
    # The best cut of the first items, for each number of items.
    best = [(cost(0, end), [end]) for end in range(count + 1)]
    for pieces in range(2, stages + 1):
        best = [
            min(
                (combine(best[cut][0], cost(cut, end)), [*best[cut][1], end])
                for cut in range(pieces - 1, end)
            )
            if end >= pieces
            else (math.inf, [])
            for end in range(count + 1)
        ]
    return best[-1]


def check_place(pattern: Any, stage: Any, stages: int) -> None:
    """Checks an entry of a placement; see `placed`."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"Received placement={{{pattern!r}: ...}}; expected a regular expression "
            f"for names of layers, but {error}."
        ) from error
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < stages:
        raise ValueError(
            f"Received placement={{{pattern!r}: {stage!r}}} with stages={stages}; "
            f"expected a stage from 0 to {stages - 1}."
        )


def _listed(names: Sequence[str], most: int = 20) -> str:
    listed = ", ".join(names[:most])
    more = len(names) - most
    return f"{listed} and {more} more" if more > 0 else listed
