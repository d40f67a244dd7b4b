"""Flags that are parts of others now: they work until Towers 0.4, and say so."""

import decimal
import re
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags


def _split(place: int) -> Callable[[Sequence[str] | None, str], list[str]]:
    def changed(splits, old):
        both = [*(splits or ()), "", ""][:2]
        both[place] = old
        return both if both[1] else both[:1]

    return changed


def _entry(name: str, join: str) -> Callable[[Sequence[str] | None, str], list[str]]:
    """Returns a function that sets an entry of a list."""
    return lambda entries, old: [
        *(text for text in entries or () if not text.startswith(f"{name}{join}")),
        f"{name}{join}{old}",
    ]


def _mix(name: str) -> Callable[[Sequence[str] | None, str], list[str] | None]:
    """Returns a function that sets an alpha; 0 says that nothing is mixed."""
    set_entry = _entry(name, ":")
    return lambda entries, old: (
        set_entry(entries, old) if old != "0" else set_entry(entries, old)[:-1] or None
    )


def _saved_by(unit: str) -> Callable[[Sequence[str], str], list[str]]:
    def changed(points, old):
        is_other = [text for text in points if text.endswith("min") != (unit == "min")]
        kept = [text for text in is_other if text != "none"]
        return [*kept, f"{old}{unit}"]

    return changed


def _second(asked: str, old: str) -> str:
    """Sets what follows the colon."""
    return f"{asked.partition(':')[0]}:{old}"


def _unless(default: str) -> Callable[[str, str], str]:
    """Returns a function that sets what follows the colon, unless it is the default."""
    return lambda asked, old: (
        asked.partition(":")[0] if old == default else _second(asked, old)
    )


def _waits(shares: str | None, old: str) -> str | None:
    if shares is None:
        return None
    least, most = [*shares.split(":"), "1"][:2]
    return f"{least}:{most}:{old}"


def _all_of_it(_: Any, old: str) -> str:
    """Takes the old flag as the whole value."""
    return old


def _limit(_: Any, old: str) -> str:
    if not float(old) > 1:
        raise ValueError("a number of MB of more than 1")
    return old


def _fraction(_: Any, old: str) -> str:
    if not 0 < float(old) <= 1:
        raise ValueError("more than 0 and at most 1")
    return old


# By the old flag: its type, the flag that has its value now, and the value of that flag
# from the one that it has without the old flag, and the old flag's.
_MOVED: dict[str, tuple[type, str, Callable[[Any, str], Any]]] = {
    "max_bad_records": (
        *(int, "bad_records"),
        lambda asked, old: _second(asked, old) if asked.startswith("skip") else asked,
    ),
    "train_split": (str, "splits", _split(0)),
    "eval_split": (str, "splits", _split(1)),
    "mixup_alpha": (float, "mix", _mix("mixup")),
    "cutmix_alpha": (float, "mix", _mix("cutmix")),
    "cache_dir": (
        *(str, "cache"),
        lambda asked, old: (
            _second(asked, old) if asked.startswith(("auto", "disk")) else asked
        ),
    ),
    "local_store_gb": (
        *(float, "local_store"),
        lambda asked, old: asked and f"{old}:{re.sub('^[0-9.]+:', '', asked)}",
    ),
    "image_key": (str, "image_column", _all_of_it),
    "label_key": (str, "label_column", _all_of_it),
    "layers": (int, "model_options", _entry("layers", "=")),
    "width": (int, "model_options", _entry("width", "=")),
    "heads": (int, "model_options", _entry("heads", "=")),
    "positions": (str, "model_options", _entry("positions", "=")),
    "dropout": (float, "model_options", _entry("dropout", "=")),
    "sparsity": (float, "model_options", _entry("sparsity", "=")),
    "batch_size_per_tower": (int, "batch_size", lambda _, old: int(old)),
    "allow_growth": (
        *(bool, "gpu_memory"),
        lambda _, old: "growth" if old == "true" else "all",
    ),
    "gpu_memory_limit_mb": (int, "gpu_memory", _limit),
    "gpu_memory_fraction": (float, "gpu_memory", _fraction),
    "join_seconds": (float, "share_gpus", _waits),
    "pipeline_schedule": (str, "micro_batches", _unless("1f1b")),
    "all_reduce_alg": (str, "variable_update", _unless("auto")),
    "max_staleness": (int, "variable_update", _second),
    "save_steps": (int, "save_every", _saved_by("")),
    "save_minutes": (float, "save_every", _saved_by("min")),
    "monitor_mode": (
        *(str, "monitor"),
        lambda asked, old: (
            _log(asked) if old == "auto" else f"{old}:{_log(asked) or ''}"
        ),
    ),
    "stall_seconds": (
        *(float, "on_stall"),
        lambda asked, old: (
            _second(asked.replace("never", "wait"), old) if old != "0" else "never"
        ),
    ),
}
NAMES = (*_MOVED,)
# Values that say nothing of what an old flag says, of flags that may say it.
_WITHOUT_PARTS = {
    "bad_records": "fail|skip",
    "cache": "auto|memory|disk|none",
    "local_store": "(?![0-9.]+:).*",
    "share_gpus": "[^:]*(:[^:]*)?",
    "micro_batches": "[^:]*",
    "variable_update": "[^:]*",
    "monitor": "(?!min:|max:).*",
    "on_stall": "wait|stop",
}
_DEFINE = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
}


def _log(asked: str | None) -> str | None:
    return asked and re.sub("^(min|max):", "", asked)


# It is a flag of towers.parity alone, and other programs never read it.
_OF_PARITY = "parity_steps"


def define(values: flags.FlagValues) -> list[str]:
    """Adds the old flags of a program to its flags; returns their names."""
    old = [name for name, (_, flag, _) in _MOVED.items() if flag in values]
    old = [name for name in old if name not in values]
    if "train_epochs" in values and _OF_PARITY not in values:
        old.append(_OF_PARITY)
    for name in old:
        kind = _MOVED[name][0] if name in _MOVED else int
        _DEFINE[kind](name, None, "An old flag.", flag_values=values)
    return old


def move(
    values: flags.FlagValues, old: Sequence[str], arguments: Sequence[str]
) -> str | None:
    """Gives the values of old flags to those of today; of two, the later one counts.

    Args:
        values: The flags, parsed.
        old: The result of `define`.
        arguments: What was parsed.

    Returns:
        A sentence that names the old flags; `None` if none was given.

    Raises:
        ValueError: The value of an old flag is malformed, or contradicts another flag.
    """
    said = []
    places = order(arguments, values)
    says = {name: values[name].value for name in places}
    for name in [name for name in old if values[name].value is not None]:
        if name == _OF_PARITY:
            said.append(f"--{name} (for towers parity only)")
            continue
        _, today, changed = _MOVED[name]
        said.append(f"--{name} (now in --{today})")
        if name == "batch_size_per_tower":
            _check_batch(values)
            values["elastic_batch"].value = "at_start"
        elif places[name] < places.get(today, -1) and _says(today, says[today], name):
            continue
        text = _text(values[name].value)
        try:
            values[today].value = changed(values[today].value, text)
        except ValueError as error:
            message = f"Received --{name}={text}; expected {error}."
            raise ValueError(message) from error
        values[today].using_default_value = False
    if not said:
        return None
    return f"Old flags, which work until Towers 0.4: {', '.join(said)}."


def order(arguments: Sequence[str], values: flags.FlagValues) -> dict[str, int]:
    """Returns where each flag was given last, by its name."""
    places = {}
    for place, argument in enumerate(arguments):
        name = re.match(r"-{0,2}(\w*)", argument)[1]
        name = name if name in values else name.removeprefix("no")
        if argument.startswith("-") and name in values:
            places[name] = place
    return places


def _says(today: str, value: Any, old: str) -> bool:
    """Tells whether a flag's value says itself what an old flag says."""
    if today == "model_options":
        return any(text.startswith(f"{old}=") for text in value)
    without = _WITHOUT_PARTS.get(today)
    return without is None or not re.fullmatch(without, value, re.DOTALL)


def _check_batch(values: flags.FlagValues) -> None:
    """Checks that nothing else says how large a batch is."""
    per_tower = f"--batch_size_per_tower={values['batch_size_per_tower'].value}"
    batch, elastic = values["batch_size"], values["elastic_batch"].value
    other = f"--batch_size={batch.value}" if batch.value != batch.default else None
    other = None if elastic == "at_start" else other
    other = f"--elastic_batch={elastic}" if elastic == "per_tower" else other
    if other:
        raise ValueError(
            f"Received {per_tower} and {other}; expected one of them, or --batch_size "
            "and --elastic_batch=at_start instead of the old flag."
        )


def _text(value: Any) -> str:
    """Returns a value as the flags of today take it: 10.0 as 10, 1e-05 as 0.00001."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{decimal.Decimal(repr(value)):f}".removesuffix(".0")
    return str(value)
