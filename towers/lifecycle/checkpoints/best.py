"""Chooses the best checkpoint of a run, by a metric.

The end of a run makes `best.keras` of it: separate rules would disagree.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import keras

MODES = ("auto", "min", "max")


@dataclasses.dataclass(frozen=True)
class Best:
    """The best checkpoint.

    Attributes:
        path: Its path.
        epoch: The number of finished epochs.
        monitor: The name of the metric.
        value: Its value after the last of these epochs.
        logs: Other known metrics of that epoch, by name.
    """

    path: str
    epoch: int
    monitor: str
    value: float
    logs: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Monitor:
    """The metric that scores an epoch.

    Attributes:
        asked: The requested metric; `None` for `val_loss`, or `loss` without validation
            data.
        mode: "min" or "max", or "auto", as Keras infers it from the metric.
        name: The metric in use; `None` as long as it is not known.
    """

    asked: str | None = None
    mode: str = "auto"
    name: str | None = None

    def __post_init__(self):
        if not (self.asked is None or isinstance(self.asked, str)):
            raise ValueError(
                f"Received monitor={self.asked!r}; expected the name of a metric, such "
                "as 'val_loss', or None."
            )
        if self.mode not in MODES:
            raise ValueError(
                f"Received mode={self.mode!r}; expected 'auto', 'min' or 'max'."
            )
        self.name = self.asked

    def score(
        self, logs: Mapping[str, Any], validates: bool, model: keras.Model
    ) -> float | None:
        """Returns the score of an epoch; `None` if it is unknown, or not finite.

        Args:
            logs: The logs of the epoch.
            validates: Whether any epoch of the run has a validation.
            model: The model with the metrics.

        Raises:
            ValueError: There is no such metric, or it is unknown whether more is
                better.
        """
        if self.asked is not None and not logs:
            raise ValueError(
                f"Received monitor='{self.asked}', and the epoch has measured nothing "
                "at all; expected training data of at least one batch, and a "
                "train_step that returns what it measures."
            )
        if self.asked is None:
            self.name = "val_loss" if validates or "val_loss" in logs else "loss"
        elif self.asked not in logs and not (
            # An epoch that `validation_freq` leaves out.
            self.asked.startswith("val_")
            and validates
            and not any(name.startswith("val_") for name in logs)
        ):
            raise ValueError(
                f"Received monitor='{self.asked}', which the epoch has not measured; "
                f"expected one of {', '.join(sorted(logs))}."
            )
        self.settle(model)
        return _number(logs.get(self.name))

    def settle(self, model: keras.Model) -> None:
        """Infers whether more is better; see `score`."""
        if self.mode != "auto":
            return
        if self.name.removeprefix("val_") == "loss":
            self.mode = "min"
            return
        # This callback asks the metrics of the model, and has no other public method
        # for it.
        judge = keras.callbacks.EarlyStopping(self.name)
        judge.set_model(model)
        judge.on_train_begin()
        try:
            judge.on_epoch_end(0, {self.name: 0.0})
        except ValueError as error:
            raise ValueError(
                f"Received monitor='{self.name}', but Keras does not know whether more "
                "of it is better; expected mode='min' or mode='max' as well."
            ) from error
        self.mode = "max" if judge.monitor_op is keras.ops.greater else "min"

    def describe(self, score: float | None) -> dict[str, Any]:
        """Returns a score, with its metric and mode, as a checkpoint stores them."""
        return {"score": score, "monitor": self.name, "mode": self.mode}

    def recall(self, about: Mapping[str, Any]) -> None:
        """Takes metric and mode of an earlier run, unless others were requested."""
        if self.asked is None and self.name is None:
            self.name = about.get("monitor") or _before_names(about)
        if self.mode == "auto" and self.name == about.get("monitor"):
            self.mode = about.get("mode", "auto")

    def read(self, about: Mapping[str, Any]) -> float | None:
        """Returns the score of a checkpoint, if it was made at the end of an epoch."""
        _, batch = about.get("position", (0, 0))
        if batch:
            return None
        if self.name == (about.get("monitor") or _before_names(about)):
            return _number(about.get("score"))
        # The score is by another metric, but the history has all metrics.
        return last_logs(about).get(self.name)

    def epochs_since_best(self, about: Mapping[str, Any]) -> int:
        """Returns how many epochs of a checkpoint's history came after its best one."""
        values = about["history"]["history"].get(self.name, [])
        scores = zip(itertools.count(), map(_number, values))
        best = self.best(scores)
        return 0 if best is None else len(values) - 1 - best

    def best(self, scores: Iterable[tuple[str, float | None]]) -> str | None:
        """Returns the first of the best checkpoints.

        `scores` has the path and the score of each checkpoint, the earliest first.
        """
        scored = [(path, score) for path, score in scores if score is not None]
        choose = max if self.mode == "max" else min
        path, _ = choose(scored, key=lambda pair: pair[1], default=(None, None))
        return path


def last_logs(about: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of the epoch at whose end a checkpoint was made, by name."""
    epoch, batch = about.get("position", (0, 0))
    whole, history = about["history"]["epoch"], about["history"]["history"]
    if batch or not whole or whole[-1] != epoch - 1:
        return {}
    logs = {
        name: _number(values[-1])
        for name, values in history.items()
        if len(values) == len(whole)
    }
    return {name: value for name, value in logs.items() if value is not None}


def _before_names(about):
    """Returns the metric of an older checkpoint, which does not name it."""
    return "val_loss" if "val_loss" in about["history"]["history"] else "loss"


def _number(value):
    try:
        value = float(value)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
