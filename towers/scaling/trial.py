"""Trains for some seconds with one number of towers, and says how fast.

`towers.scaling` starts it, a process for each number of towers. All is as in training,
with the run's own data, but nothing is evaluated or saved.
What is found is printed on stdout, in lines of JSON.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.program import startup
    from towers.scaling import scaling_flags

    _settings = startup.begin(
        "towers.scaling.trial", scaling_flags.read_checked, sift=False
    )

import functools
import sys
import time
from collections.abc import Callable

import keras

from towers.find_batch_size import child
from towers.program import startup
from towers.scaling.scaling_flags import Scaling
from towers.train import callbacks
from towers.train.job import assemble

# Steps that are not measured, as graphs are built and buffers are filled in them.
_WARM_UP = 3
# Training ends after so many times the seconds that are asked for, measured or not.
_MOST = 20


def train(settings: Scaling, tell: Callable[..., None]) -> None:
    """Trains, and tells of it.

    Args:
        settings: How to train, on which towers and for how long.
        tell: Takes facts: first which towers there are, then how fast they are.

    Raises:
        ValueError: If any input is bad.
    """
    job = assemble(settings)
    builder = job.parallel.builder
    tell(
        towers=job.towers,
        sizes=job.sizes,
        split_ratios=[*builder.plan.split_ratios],
        memory="GPU" if job.devices.physical else "process",
        note=job.devices.note,
    )
    watch = callbacks.make_watch(job, warmup_steps=_WARM_UP)
    measuring = [*watch.callbacks, _Stop(settings.seconds, watch)]
    # Ways to update the variables take turns at first, which is not measured.
    for added in ([_StopOnceChosen()], measuring):
        job.parallel.fit(
            job.data.training,
            epochs=sys.maxsize,
            steps_per_epoch=job.data.steps_per_epoch(),
            callbacks=added,
            verbose=0,
            shuffle=False,  # the pipeline has shuffled already
            class_weight=job.class_weight,
        )
    split = watch.starvation.split
    if watch.throughput.examples_per_sec is None or not (split and split.parts_ms):
        raise ValueError(
            f"Received {settings.as_flag('seconds')}, in which no step was measured; "
            "expected more, so give twice as many --seconds."
        )
    tell(
        fits=True,
        examples_per_sec=watch.throughput.examples_per_sec,
        parts_ms=split.parts_ms,
        towers_ms=split.towers_ms,
        verdict=str(watch.starvation.verdict or ""),
        peak_memory_mb=child.peak_memory_mb(job.devices),
        gradient_bytes=_gradient_bytes(job.model),
    )


def _gradient_bytes(model):
    """The bytes that hosts would add: each gradient in the type of its variable."""
    values = [variable.value for variable in model.trainable_variables]
    return sum(value.shape.num_elements() * value.dtype.size for value in values)


class _StopOnceChosen(keras.callbacks.Callback):
    """Ends training once the way to update the variables is chosen."""

    def on_train_batch_end(self, batch, logs=None):
        """Ends training after the step that has chosen."""
        if not self.model.is_choosing:
            self.model.stop_training = True


class _Stop(keras.callbacks.Callback):
    """Ends training once it has taken as many seconds as were asked for."""

    def __init__(self, seconds, watch):
        super().__init__()
        self._seconds, self._watch = seconds, watch
        self._begun_s = None

    def on_train_batch_end(self, batch, logs=None):
        """Ends training after the step that takes the time to its end."""
        now_s = time.perf_counter()
        if self._begun_s is None:  # not before: the first call builds graphs
            self._begun_s = now_s
        enough = self._watch.throughput.seconds >= self._seconds
        if enough or now_s - self._begun_s >= _MOST * self._seconds:
            self.model.stop_training = True


if __name__ == "__main__":
    startup.leave(child.answer(functools.partial(train, _settings)))
