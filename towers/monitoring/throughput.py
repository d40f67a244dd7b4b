"""Measures examples per second."""

import collections
import statistics
import time
from collections.abc import Callable, Sequence

import keras

from towers.model import fit_call
from towers.monitoring.steps import Calls
from towers.program import words

# The most calls used for the median and the slowest tenth.
_CALLS = 1000


@fit_call.changes_no_variable
class Throughput(keras.callbacks.Callback):
    """Measures how many examples per second are trained on.

    Only the time inside training calls counts. Validation, saving and the warm-up, in
    which graphs are built, do not. The callback adds the mean of the epoch so far to
    Keras's logs, as `examples_per_sec`. Put it first in the list, so that all later
    callbacks see the value (progress bar, TensorBoard, history).

    Towers step together, so each tower's throughput is its part of the total.

    Attributes:
        fractions: Fraction of a full batch that each tower of this host gets.
        first_tower: The number of the first of these towers among those of all hosts.
    """

    def __init__(
        self,
        batch_size: int,
        examples: int | None = None,
        warmup_steps: int = 10,
        fractions: Sequence[float] = (),
        clock: Callable[[], float] = time.perf_counter,
        tokens: float = 0,
    ):
        """Initializes the callback.

        Args:
            batch_size: Number of examples in a full global batch.
            examples: Number of examples in an epoch, if known. The last batch may be
                short.
            warmup_steps: Steps at the beginning of the run that are not counted.
            fractions: Fraction of a full batch that each tower gets.
            clock: Returns seconds.
            tokens: The mean number of tokens in an example, without padding; 0 if
                examples are not text. For text, tokens per second are shown as well.
        """
        super().__init__()
        self._batch_size = batch_size
        self._examples = examples
        self.fractions, self.first_tower = fractions, 0
        self._tokens = tokens
        self._calls = Calls(warmup_steps, clock)
        self._counted = 0
        self._counted_s = 0.0
        self._epoch_counted = 0
        self._epoch_counted_s = 0.0
        self._rates = collections.deque(maxlen=_CALLS)
        self._told = 0, 0.0

    @property
    def examples_per_sec(self) -> float | None:
        """Examples per second over the run so far, `None` during the warm-up."""
        return self._counted / self._counted_s if self._counted_s else None

    @property
    def tokens_per_sec(self) -> float | None:
        """Tokens per second over the run so far, `None` for data without tokens."""
        rate = self.examples_per_sec
        return rate * self._tokens if rate is not None and self._tokens else None

    @property
    def seconds(self) -> float:
        """Time inside training calls so far, without the warm-up."""
        return self._counted_s

    def text(self, fraction: float = 1.0) -> str:
        """Describes the throughput: the median, and how slow the slowest steps are.

        Both are of the last 1000 calls of training. Only the text on all examples names
        the slowest tenth of the steps.

        Args:
            fraction: Fraction of the examples to describe, such as that of one tower.
        """
        if not self._rates:
            return "The speed was not measured, as the run ended while it warmed up"
        rates = sorted(self._rates)
        median = fraction * statistics.median(rates)
        text = words.rate(median)
        if self._tokens:
            text += f", {words.rate(median * self._tokens, 'tokens')}"
        tenth = len(rates) // 10
        if fraction < 1 or not tenth:
            return text
        slow = words.rate(rates[tenth - 1])
        return f"{text} (median); {slow} or fewer in the slowest tenth of the steps"

    def measured(self) -> dict[str, float]:
        """Returns examples per second since the last call, in total and by tower."""
        count, seconds = self._told
        self._told = self._counted, self._counted_s
        if self._counted_s == seconds:
            return {}
        rate = (self._counted - count) / (self._counted_s - seconds)
        towers = {f"/tower_{k}": part for k, part in enumerate(self.fractions)}
        rates = {
            f"examples_per_sec{tower}": rate * part
            for tower, part in {"": 1.0, **towers}.items()
        }
        return rates | ({"tokens_per_sec": rate * self._tokens} if self._tokens else {})

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the epoch's count."""
        self._epoch_counted, self._epoch_counted_s = 0, 0.0

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock; `batch` is the first of the call's batches."""
        self._calls.begin(batch)

    def on_train_batch_end(self, batch, logs=None):
        """Stops the clock; `batch` is the last of the call's batches."""
        call = self._calls.end(self.model, batch)
        examples = self._seen(call.end) - self._seen(call.first)
        if call.warm:
            self._counted += examples
            self._counted_s += call.seconds
            self._rates.append(examples / call.seconds)
            self._epoch_counted += examples
            self._epoch_counted_s += call.seconds
        self._report(logs)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epoch's mean to the logs."""
        self._report(logs)

    def _report(self, logs):
        # A mean, like all values that Keras logs: single steps vary.
        if self._epoch_counted_s:
            logs["examples_per_sec"] = self._epoch_counted / self._epoch_counted_s

    def _seen(self, batches):
        seen = batches * self._batch_size
        return seen if self._examples is None else min(seen, self._examples)
