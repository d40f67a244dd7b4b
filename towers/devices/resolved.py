"""Resolves the user's device arguments to the strings of existing devices."""

import re
from collections.abc import Sequence

from towers.devices.names import of_this_process
from towers.devices.wish import check_unique, is_int

_DEVICE = re.compile(
    r"(?:/job:\w+/replica:0/task:\d+)?/?(?:device:)?(CPU|GPU):(\d+)", re.IGNORECASE
)


def resolve(
    gpus: int | Sequence[int | str] | None = None, argument: str = "gpus"
) -> tuple[str, ...]:
    """Turns a `gpus` argument into the strings of devices that exist.

    This initialises TensorFlow. Numbers mean GPUs, or logical CPUs where
    TensorFlow sees no GPU.

    >>> resolve(["cpu:0"])
    ('/device:CPU:0',)

    Args:
        gpus: None for all; a count, from the first; or a list of indices and of strings
            such as "/gpu:0", "GPU:0" or "/device:GPU:0".
        argument: The name of the argument, for errors about an item of a list.

    Returns:
        One string for each tower, such as "/device:GPU:0".

    Raises:
        ValueError: A device does not exist, comes twice or is not understood.
    """
    existing = [device for device in of_this_process() if _canonical(device)]
    numbered = [d for d in existing if ":GPU:" in d] or [
        d for d in existing if ":CPU:" in d
    ]
    if gpus is None:
        return tuple(numbered)
    if is_int(gpus):
        if not 1 <= gpus <= len(numbered):
            raise ValueError(
                f"gpus={gpus} was received, but a count must be from 1 to "
                f"{len(numbered)} here, for {_listed(numbered)}; "
                f"{_more_devices(numbered)}."
            )
        return tuple(numbered[:gpus])
    if not isinstance(gpus, Sequence) or isinstance(gpus, str | bytes) or not gpus:
        raise ValueError(
            f"gpus must be None, a count or a list of indices or device strings, but "
            f"{gpus!r} was received; write for example gpus=2 or "
            f"gpus=[{numbered[0]!r}]."
        )
    devices = tuple(_resolve_one(gpu, numbered, existing, argument) for gpu in gpus)
    check_unique("gpus", gpus, devices)
    return devices


def _canonical(text: str) -> str | None:
    match = _DEVICE.fullmatch(text.strip())
    return f"/device:{match[1].upper()}:{int(match[2])}" if match else None


def _resolve_one(
    wish: int | str, numbered: Sequence[str], existing: Sequence[str], argument: str
) -> str:
    if is_int(wish) and 0 <= wish < len(numbered):
        return numbered[wish]
    device = _canonical(wish) if isinstance(wish, str) else None
    if device in existing:
        return device
    if device is None and not is_int(wish):
        raise ValueError(
            f"{wish!r} in {argument} is neither an index nor a device string; choose "
            f"from {_listed(existing)}."
        )
    raise ValueError(
        f"{argument} names {wish!r}, which does not exist here; choose from "
        f"{_listed(numbered if is_int(wish) else existing)}, or "
        f"{_more_devices(numbered)}."
    )


def _listed(devices: Sequence[str]) -> str:
    return ", ".join(devices)


def _more_devices(numbered: Sequence[str]) -> str:
    if ":GPU:" in numbered[0]:
        return "make more GPUs visible with CUDA_VISIBLE_DEVICES"
    return (
        "restart the program (in a notebook, the kernel), and make more logical CPUs "
        "with towers.configure(num_gpus=...) before a model is built"
    )
