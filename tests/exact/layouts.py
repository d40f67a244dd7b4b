"""The ways in which devices share a model and its batches: the columns of the table."""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

import keras

import towers
from tests.exact import oracle
from tests.exact.case import Case
from tests.valued import valued
from towers.collectives import reduce
from towers.layers import parameters
from towers.layers.pipeline import balanced, weighted
from towers.model import options as model_options

# Of models that are built by their data: how many layers have weights.
BUILT_LATER = {
    "batches/ragged and sparse inputs, not built": 2,
    "batches/ragged inputs": 1,
    "loops/ragged inputs, prefetch=2": 1,
    "loops/ragged inputs, steps_per_execution=2": 1,
    "metrics in calls/a model": 2,
    "metrics in calls/a model with a loss of its own": 2,
    "metrics in calls/what a model returns instead": 2,
    "models/not built": 1,
    "state/BatchNormalization, called for inference": 2,
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How devices share a model, and a batch.

    Attributes:
        update: How variables are updated.
        towers: How many towers each host has. Empty: one host with as many as the case
            asks for.
        stages: Stages of a tower. A model with fewer layers with weights gets a stage
            for each.
        micro_batches: How many parts of its rows a tower of stages computes.
        schedule: In which order.
        recompute: What is computed again in the backward pass.
        shard_optimizer_state: Whether towers divide the optimizer's state.
        shard_embeddings: How towers divide embedding tables: "rows", "columns", "auto".
        resized: Whether the towers change before each call of training or validation.
        nccl: Whether towers add gradients where these are, as GPUs do by NCCL.
        compiled_first: Whether the model is compiled before it is wrapped.
        options: Further ones, as pairs; see `valued`.
    """

    update: str = "parameter_server"
    towers: tuple[int, ...] = ()
    stages: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    shard_optimizer_state: bool = False
    shard_embeddings: str | None = None
    resized: bool = False
    nccl: bool = False
    compiled_first: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self):
        fields = dataclasses.fields(self)
        changed = [f.name for f in fields if getattr(self, f.name) != f.default]
        words = [f"{name}={getattr(self, name)}" for name in changed]
        return ", ".join(words) or "towers"

    def of(self, case: Case) -> Case:
        """Returns the case with what is expected of it in this layout."""
        if self.update == "asynchronous":
            return alone(case)
        count = sum(self.towers) or case.towers
        parts = count * self.micro_batches
        if parts == 1 and self.stages > 1:
            return alone(case)
        if self.resized:
            callbacks = [*case.fit.get("callbacks", ()), Resizes(self.stages)]
            case = dataclasses.replace(case, fit={**case.fit, "callbacks": callbacks})
        # A reference computes each part by itself.
        return dataclasses.replace(case, towers=parts)

    def wrap(self, case: Case, rank: int = 0) -> Callable[[keras.Model], keras.Model]:
        """Returns what makes the model of this host's towers.

        Args:
            case: A case as `of` returns it.
            rank: The number of this host.
        """
        count = self.towers[rank] if self.towers else case.towers // self.micro_batches
        first = sum(self.towers[:rank])

        def wrapped(model):
            options = in_stages(case, model, self.stages) | case.options
            if ratios := options.get("split_ratios"):
                several = [ratios[k % len(ratios)] for k in range(first + count)]
                options["split_ratios"] = several[first:]
            if self.shard_embeddings:
                options["shard_embeddings"] = self.shard_embeddings
            if self.nccl:
                options["all_reduce"] = "nccl"
            if self.shard_optimizer_state:
                options["shard_optimizer_state"] = True
            if self.stages > 1 or self.micro_batches > 1:
                options["micro_batches"] = self.micro_batches
                options["schedule"] = self.schedule
                options["recompute"] = self.recompute
            gpus = 2 if self.resized else count * options.get("stages", 1)
            options |= {"variable_update": self.update, **dict(self.options)}
            return towers.multi_gpu_model(model, gpus, **valued(**options))

        return wrapped

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, small variables can be divided, and CPUs add as GPUs do by NCCL."""
        with contextlib.ExitStack() as patches:
            if self.shard_optimizer_state:
                patches.enter_context(mock.patch.object(parameters, "MIN_BYTES", 1))
            if self.nccl:
                for module in reduce, model_options:
                    fits = mock.patch.object(module, "nccl_fits", lambda towers: True)
                    patches.enter_context(fits)
            yield

    def outcome(
        self, case: Case, rank: int = 0, later: Collection[str] = oracle.LATER
    ) -> dict[str, Any]:
        """Runs a case so, and compares it with one device; see `oracle.outcome`."""
        case = self.of(case)
        wrap = self.wrap(case, rank)
        with self.allowed():
            record = oracle.outcome(
                case, wrap, later=later, compiled_first=self.compiled_first
            )
        return record | {"layout": str(self), "expected": case.verdict}


# By the stages of a tower: devices, and the ratios of shares. Fewer and more than the
# two to begin with, also without the first of them.
CHANGES = {
    1: [((0, 1), None), ((3,), None), ((1, 3, 2), (2, 1, 3))],
    2: [((2, 3), None), ((3, 0, 1, 2), (1, 2)), ((0, 1), None)],
}


class Resizes(keras.callbacks.Callback):
    """Resizes a tower model before each call, and leaves plain Keras alone."""

    def __init__(self, stages):
        super().__init__()
        self._layouts = itertools.cycle(CHANGES[stages])

    def on_train_batch_begin(self, batch, logs=None):
        if hasattr(self.model, "resize"):
            gpus, ratios = next(self._layouts)
            self.model.resize(gpus=gpus, split_ratios=ratios)

    on_test_batch_begin = on_train_batch_begin


def alone(case: Case) -> Case:
    """Returns the case on one tower, to which what several cannot cut is the whole."""
    options = {name: v for name, v in case.options.items() if name != "split_ratios"}
    # Some are refused whatever the number of towers.
    refused = case.expect == "stateful"
    expect = {} if refused else {"expect": "equal", "only": ""}
    return dataclasses.replace(case, towers=1, options=options, **expect)


def in_stages(case: Case, model: keras.Model, most: int) -> dict[str, Any]:
    """Returns options for `valued`, for as many stages as there can be.

    Each has a layer with weights. Sizes decide which ones, and no clock.
    """
    if most == 1:
        return {}
    if not model.built:
        return {"stages": min(BUILT_LATER.get(str(case), most), most)}
    layers = weighted(model)
    stages = max(min(most, len(layers)), 1)
    if stages == 1:
        return {}
    stage_of = balanced(model, stages)
    # Within a model, names are unique.
    placement = {
        re.escape(layer.path or layer.name): stage_of[id(layer)] for layer in layers
    }
    return {"stages": stages, "placement": placement}
