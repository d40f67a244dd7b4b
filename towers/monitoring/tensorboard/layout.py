"""What two dashboards of TensorBoard's show: custom scalars, and hyper-parameters."""

import itertools
import os
from collections.abc import Mapping

from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalar
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import summary as hparams_plugin

Value = bool | int | float | str

# HParams finds metrics only beside the parameters, in the run `train`.
VALIDATION = "hparams/validation_"
# Columns that it shows at first: those that are said to differ, then others by name.
_SHOWN = 5
# Regular expressions of the tags in each chart. They match from the beginning.
_PAGE = {
    "Is it learning?": {
        "Loss": ["epoch_loss$"],
        "Accuracy": ["epoch_accuracy$"],
        "Loss, by batch": ["batch_loss$"],
        "Learning rate": ["batch_learning_rate$"],
    },
    "Is it fast?": {
        "Examples per second": ["examples_per_sec$"],
        "Examples per second, each tower": ["examples_per_sec/tower_.*"],
        "Milliseconds of a step": ["step_ms/(input|copy|compute|reduce|python)$"],
        "Milliseconds that each tower computes": ["step_ms/tower_.*"],
    },
    "Is it starved?": {
        "Share of time waiting for input": ["waiting$"],
        "Milliseconds of a step waiting for input": ["step_ms/input$"],
        "Utilization of devices": ["device/.*/utilization$"],
        "Memory of GPUs in MB": ["device/gpu.*_mb$"],
        "Memory of the process in MB": ["device/cpu.*_mb$"],
    },
}


def layout_summary() -> bytes:
    """Returns the layout of custom scalars as a summary, to be written as it is."""
    categories = [
        layout_pb2.Category(
            title=title,
            chart=[
                layout_pb2.Chart(
                    title=name, multiline=layout_pb2.MultilineChartContent(tag=tags)
                )
                for name, tags in charts.items()
            ],
        )
        for title, charts in _PAGE.items()
    ]
    layout = layout_pb2.Layout(category=categories)
    return custom_scalar.pb(layout).SerializeToString()


def hparams_summaries(log_dir: str, hparams: Mapping[str, Value]) -> list[bytes]:
    """Returns a run's hyper-parameters, and the metrics to show beside them.

    The values to be seen first come before the others. The run's directory tells it
    from others. The summaries are to be written as they are.
    """
    infos = [
        api_pb2.HParamInfo(name=each, differs=place < _SHOWN)
        for place, each in enumerate(hparams)
    ]
    parts = ("train", "epoch_"), ("validation", VALIDATION)
    metrics = [
        api_pb2.MetricInfo(
            name=api_pb2.MetricName(tag=f"{prefix}{metric}"),
            display_name=f"{part} {metric}",
        )
        for (part, prefix), metric in itertools.product(parts, ("loss", "accuracy"))
    ]
    # Of a long name the beginning is seen.
    folder, name = os.path.split(os.path.abspath(log_dir))
    experiment = hparams_plugin.experiment_pb(infos, metrics)
    group = f"{name} in {folder}"
    session = hparams_plugin.session_start_pb(dict(hparams), group_name=group)
    return [each.SerializeToString() for each in (experiment, session)]
