"""Lays out TensorBoard's page of custom scalars: is it learning, fast, starved?"""

from collections.abc import Iterable

from tensorboard.plugins.custom_scalar import layout_pb2, summary

# Regular expressions of the tags in each chart. They match from the beginning.
_PAGE = {
    "Is it learning?": {
        "Loss": ["epoch_loss$"],
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
        "Utilization of devices: median, 10th percentile and minimum of samples": [
            "device/.*/utilization_(median|p10|min)$"
        ],
        "Memory of GPUs in MB": ["device/gpu.*_mb$"],
        "Memory of the process in MB": ["device/cpu.*_mb$"],
    },
}

# Of several hosts.
_OF_HOSTS = {
    "Do hosts wait for one another?": {
        "Milliseconds of a step that each host waits for others": [
            "step_ms/host_.*/waits_for_others"
        ],
        "Milliseconds that each host holds up others": [
            "step_ms/host_.*/holds_up_others"
        ],
        "Milliseconds that each host computes": ["step_ms/host_.*/compute"],
        "Milliseconds of a step, adding over hosts": ["step_ms/(network|hosts)$"],
        "MB of gradients added over hosts per second": ["hosts/mb_per_sec$"],
    },
}


def layout_summary(
    metrics: Iterable[str] = ("accuracy",), several_hosts: bool = False
) -> bytes:
    """Returns the layout as a summary, to be written as it is.

    The metrics are those of the logs, by name: each gets a chart. With several hosts,
    there are charts of these as well.
    """
    charts = {
        name.replace("_", " ").capitalize(): [f"epoch_{name}$"] for name in metrics
    }
    first, *others = _PAGE.items()
    title, (loss, *learning) = first[0], first[1].items()
    page = {title: dict([loss, *charts.items(), *learning]), **dict(others)}
    page |= _OF_HOSTS if several_hosts else {}
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
        for title, charts in page.items()
    ]
    return summary.pb(layout_pb2.Layout(category=categories)).SerializeToString()
