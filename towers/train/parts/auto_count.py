"""Finds how many GPUs pay for --num_gpus=auto, by `towers scaling`."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import tensorflow as tf

from towers.hosts import group
from towers.model import remembered
from towers.program import voice
from towers.train.settings import Settings

FILE = "num_gpus.json"
"""What is found is kept under this name, in the model_dir of a run."""


def find(settings: Settings) -> int | None:
    """Returns how many devices to train on.

    A run that continues takes what was found before for the same devices and batch,
    unless with --clean, which measures again and replaces it. Otherwise `towers
    scaling` measures it, in a process of its own before this one has initialised any
    device.

    Returns:
        The number; `None` for the default where there is nothing to train.

    Raises:
        ValueError: It cannot be measured.
    """
    hosts = group.joined()
    if hosts is not None and hosts.count > 1:
        raise ValueError(
            "Received --num_gpus=auto on several hosts; expected a number, as auto "
            "measures this machine alone."
        )
    file = os.path.join(settings.absolute_model_dir, FILE)
    key = _key(settings)
    found = None if settings.clean else _recall(file)
    if found is None or found["for"] != key:
        if settings.eval_only:
            return None
        voice.say(
            "--num_gpus=auto first trains with 1, 2, ... towers, three times for some "
            "seconds each, which takes minutes."
        )
        told = _measure(settings)
        found = {
            "for": key,
            "num_gpus": told["recommended"] * settings.stages,
            "recommendation": told["recommendation"] + _of_ratios(settings, told),
        }
        try:
            remembered.write(file, found)
        except OSError as error:
            voice.warn(f"What --num_gpus=auto has found cannot be kept: {error}.")
    voice.say(f"--num_gpus=auto: {found['recommendation']}")
    return found["num_gpus"]


def _key(settings):
    """What the number is found for."""
    gpus = tf.config.list_physical_devices("GPU")
    details = map(tf.config.experimental.get_device_details, gpus)
    names = [each.get("device_name", "GPU") for each in details]
    if not gpus:
        names = ["CPU"]
    return {
        "devices": names,
        "most": settings.max_gpus,
        "batch_size": settings.batch_size,
        "stages": settings.stages,
    }


def _of_ratios(settings, told):
    """Says that recommended ratios are not used, if so."""
    if settings.finds_ratios or len({*told["split_ratios"]}) == 1:
        return ""
    return " This run has equal parts; --split_ratios=auto finds uneven ones."


def _measure(settings):
    """Asks `towers scaling`, whose progress is seen on standard error."""
    asked = settings.but(
        num_gpus=settings.max_gpus, max_gpus=None, split_ratios=None, clean=False
    )
    # Signals are passed on: those of a terminal reach both processes.
    scaling = subprocess.Popen(
        [
            *(sys.executable, "-m", "towers.scaling", "--json"),
            *asked.as_text().splitlines(),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        out, _ = scaling.communicate()
    except BaseException:
        scaling.send_signal(signal.SIGTERM)
        scaling.wait()
        raise
    if scaling.returncode:
        raise ValueError(
            "The number of GPUs for --num_gpus=auto could not be measured (see above); "
            "expected a number, such as --num_gpus=2."
        )
    return json.loads(out)


def _recall(file: str) -> dict[str, Any] | None:
    """Returns what `find` has kept; `None` if there is nothing of this kind."""
    found = remembered.read(file)
    count, said = found.get("num_gpus"), found.get("recommendation")
    whole = isinstance(count, int) and count > 0 and isinstance(said, str)
    return found if whole and "for" in found else None
