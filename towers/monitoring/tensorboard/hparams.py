"""Says what TensorBoard's HParams dashboard is to show of a run."""

import itertools
import os
from collections.abc import Iterable, Mapping

from tensorboard.plugins.hparams import api_pb2, summary

Value = bool | int | float | str

# The dashboard finds metrics only beside the parameters, in the run `train`.
VALIDATION = "hparams/validation_"
# Columns that it shows at first: those that are said to differ, then others by name.
_SHOWN = 5


def hparams_summaries(
    log_dir: str, hparams: Mapping[str, Value], metrics: Iterable[str]
) -> list[bytes]:
    """Returns a run's hyper-parameters, and the metrics to show beside them.

    Args:
        log_dir: The run's directory, which tells it from others.
        hparams: Values by name, those to be seen first before the others.
        metrics: Names of the metrics, which are shown beside the loss.

    Returns:
        Summaries, to be written as they are.
    """
    infos = [
        api_pb2.HParamInfo(name=each, differs=place < _SHOWN)
        for place, each in enumerate(hparams)
    ]
    parts = ("train", "epoch_"), ("validation", VALIDATION)
    shown = [
        api_pb2.MetricInfo(
            name=api_pb2.MetricName(tag=f"{prefix}{metric}"),
            display_name=f"{part} {metric}",
        )
        for (part, prefix), metric in itertools.product(parts, ("loss", *metrics))
    ]
    # Of a long name the beginning is seen.
    folder, name = os.path.split(os.path.abspath(log_dir))
    experiment = summary.experiment_pb(infos, shown)
    session = summary.session_start_pb(dict(hparams), group_name=f"{name} in {folder}")
    return [each.SerializeToString() for each in (experiment, session)]
