"""Compares rows where the graph does not tell that a model keeps them apart."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from towers.analysis.rules import Rules
from towers.builders.context import Context
from towers.builders.pieces.batches import LocalBatches
from towers.builders.pieces.reader import VariableReader
from towers.collectives import batch
from towers.loop import loop
from towers.tower import compare
from towers.tower.errors import ModelError


@dataclasses.dataclass
class RowComparison:
    """Compares rows of a part of a batch with those of the whole; see `compare.py`."""

    context: Context
    reader: VariableReader
    batches: LocalBatches
    verdicts: dict[Any, compare.Comparison] = dataclasses.field(default_factory=dict)

    def check_rows(self, rules: Rules, spec: Any, x: Any, training: bool) -> None:
        """Refuses a model whose rows are seen to meet; says so where nothing is known.

        Args:
            rules: Those of the towers, of which some could not be read.
            spec: The `tf.TypeSpec`s of the model's inputs.
            x: The inputs, a nest of tensors; `None` while a graph is traced.
            training: Whether this is a part of training.

        Raises:
            BatchWanted: A graph is traced, so there are no numbers.
            ModelError: Rows meet.
        """
        name, culprit = self.context.model.name, str(rules.unread[0])
        if len(rules.unread) > 1:
            culprit += f" (and {len(rules.unread) - 1} more)"
        # Operations are named anew in each trace.
        unread = rules.unread[0].layer or rules.unread[0].operation.type
        if not self.context.strict:
            line = (
                f"Model '{name}': {culprit} cannot be read, and nothing is compared "
                "with strict=False; each tower computes its local batch."
            )
            self.context.say([line], unread)
            return
        key = training, str(spec)
        if key not in self.verdicts:
            if x is None:
                raise compare.BatchWanted(name, culprit, training, key)
            self._compare(x, training, key)
        verdict = self.verdicts[key]
        if verdict.differs:
            raise ModelError(
                f"Model '{name}' makes an example's output depend on other examples, "
                f"by {culprit}, which cannot be read: on the first batch, {verdict}; "
                "expected a model that treats each example by itself, so pass "
                "strict=False to multi_gpu_model to accept other numbers than one "
                "device's."
            )
        line = f"Model '{name}': {culprit} cannot be read; {verdict}."
        self.context.say([line], unread)
        if x is not None:
            self.forget_small_comparisons()

    def compare_first(self, data: Any, wanted: compare.BatchWanted) -> None:
        """Compares rows of a batch, before preprocessing, as a graph has asked for."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(loop.without_optionals(data))
        # As in inference: nothing random is drawn.
        _, whole = self.batches.preprocess_batch((x, None, None), training=False)
        self._compare(whole()[0], wanted.training, wanted.key)

    def forget_small_comparisons(self) -> None:
        """Forgets verdicts on batches of a single row, for a larger one to come."""
        self.verdicts = {k: v for k, v in self.verdicts.items() if v.rows > 1}

    def _compare(self, x, training, key):
        model, plan = self.context.model, self.context.plan
        x = tf.nest.map_structure(batch.as_tensor, x)
        size = int(batch.batch_size(x))
        values = self.reader.read_variables(lambda _: ())[0]

        def compared(rows):
            part = batch.take(x, 0, rows)
            with tf.device(plan.devices[0]):
                return compare.compare(model, training, values, part)

        try:
            self.verdicts[key] = compared(size)
        except tf.errors.ResourceExhaustedError:
            # A tower has room for its local batch; one device may not have it for all.
            largest = max(batch.cut(size, plan.split_ratios))
            self.verdicts[key] = compared(min(size, max(2, largest)))
