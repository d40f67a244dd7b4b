"""Exact cases by towers of stages and micro-batches, against plain Keras."""

import dataclasses

import pytest

import towers
from tests.exact import combinations, oracle, table
from tests.exact.test_exact_cases import RUNS, is_slow, number_of
from tests.variants import for_the_report, slow
from towers.layers.pipeline import placeable


@dataclasses.dataclass(frozen=True)
class Layout:
    """How devices share a model, and a batch.

    A model with fewer layers with weights than stages gets a stage for each.
    """

    towers: int
    stages: int
    micro_batches: int
    schedule: str = "1f1b"
    recompute: str = "none"
    builder: str = "parameter_server"

    def wrap(self, model, **options):
        stages = self.stages
        if model.built:
            with_weights = [each for each in placeable(model) if each.weights]
            stages = min(stages, max(len(with_weights), 1))
        if ratios := options.pop("split_ratios", None):
            options["split_ratios"] = ratios[: self.towers]
        return towers.multi_gpu_model(
            model,
            gpus=self.towers * stages,
            stages=stages,
            micro_batches=self.micro_batches,
            pipeline_schedule=self.schedule,
            recompute=self.recompute,
            variable_update=self.builder,
            **options,
        )


LAYOUTS = {
    "2 stages": Layout(1, 2, 1),
    "2 stages, 2 micro-batches": Layout(1, 2, 2),
    "2 towers of 2 stages, 2 micro-batches": Layout(2, 2, 2, builder="replicated"),
    "2 stages, 5 micro-batches, gpipe": Layout(1, 2, 5, "gpipe"),
    "4 stages, 2 micro-batches, recompute stage": Layout(1, 4, 2, "1f1b", "stage"),
    "4 stages, 5 micro-batches, recompute layer": Layout(1, 4, 5, "gpipe", "layer"),
    "2 towers of 2 stages, 5 micro-batches, recompute stage": Layout(
        2, 2, 5, "gpipe", "stage"
    ),
    "2 towers, 2 micro-batches, recompute layer": Layout(
        2, 1, 2, "1f1b", "layer", "replicated"
    ),
}
