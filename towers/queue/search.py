"""What --search and --scheduler say, read without Ray."""

from collections.abc import Sequence

DISTRIBUTIONS = "uniform", "loguniform", "randint", "lograndint"
"""Functions of Ray Tune that make a distribution of its bounds."""


def samples(text: str) -> int | None:
    """Returns how many combinations a --search draws; `None` for all of them.

    Raises:
        ValueError: It is neither grid nor random with a number.
    """
    kind, _, count = text.partition(":")
    if text == "grid":
        return None
    if kind == "random" and count.isdecimal() and int(count):
        return int(count)
    raise ValueError(
        f"Received --search={text}; expected grid, or random and how many runs to "
        "train, such as random:20."
    )


def metric(scheduler: str) -> tuple[str, str]:
    """Returns the metric of a --scheduler, and whether "min" or "max" of it is best.

    Raises:
        ValueError: It is no asha of a metric, or does not say which is best.
    """
    kind, _, rest = scheduler.partition(":")
    mode, _, name = rest.rpartition(":")
    if kind != "asha" or not name or mode not in ("", "min", "max"):
        raise ValueError(
            f"Received --scheduler={scheduler}; expected asha and a metric, such as "
            "asha:val_loss or asha:max:val_f1."
        )
    if not mode and "loss" in name:
        mode = "min"
    elif not mode and ("acc" in name or "auc" in name):
        mode = "max"
    if not mode:
        raise ValueError(
            f"Received --scheduler={scheduler}, which does not tell whether a small or "
            f"a large {name} is better; expected asha:min:{name} or asha:max:{name}."
        )
    return name, mode


def bounds(values: Sequence[str]) -> tuple[str, list[str]] | None:
    """Returns the distribution that the values of a sweep name, and its bounds.

    Args:
        values: The values, such as ["loguniform:1e-5:1e-1"].

    Returns:
        Its name and bounds; `None` if these are values.
    """
    name, *numbers = values[0].split(":")
    if len(values) == 1 and name in DISTRIBUTIONS:
        return name, numbers
    return None
