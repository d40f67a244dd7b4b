"""Asks devices, and the stages of the input, for a sign of life."""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf


def ask(questions: Mapping[str, Callable[[], Any]], limit_s: float) -> dict[str, str]:
    """Asks all at once, each in a thread of its own, which waits on if need be.

    Args:
        questions: By name; each returns as soon as there is an answer.
        limit_s: How many seconds they have.

    Returns:
        What is wrong with those that do not answer, a phrase each.
    """
    faults = dict.fromkeys(questions, f"gives nothing within {limit_s:g} s")

    def answer(name):
        try:
            questions[name]()
        except Exception as error:
            first, *_ = str(error).splitlines() or [""]
            faults[name] = f"fails: {type(error).__name__}: {first}"
        else:
            del faults[name]

    threads = [
        threading.Thread(
            target=answer, args=(name,), name=f"towers-ask {name}", daemon=True
        )
        for name in questions
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(faults)


def compute(device: str) -> None:
    """Waits until a device has computed something."""
    with tf.device(device):
        # Whatever the device has to do comes first.
        (tf.ones([]) + 1).numpy()


def ask_input(pipeline: Any, limit_s: float) -> str | None:
    """Reads the first of each stage; returns what is wrong with one of them.

    Args:
        pipeline: A `towers.input_pipeline.Pipeline`.
        limit_s: How many seconds each stage has.
    """
    stages = []
    # In a thread, too: a data service is called already.
    opens = {"opening": lambda: stages.extend(_stages(pipeline))}
    for name, fault in ask(opens, limit_s).items():
        return f"{name} {fault}"
    for stage, dataset in stages:
        reads = {f"stage {stage!r}": functools.partial(_read, dataset)}
        for name, fault in ask(reads, limit_s).items():
            return f"{name} {fault}"
    return None


def _read(dataset: tf.data.Dataset) -> None:
    next(iter(dataset), None)


def _stages(pipeline: Any) -> list[tuple[str, tf.data.Dataset]]:
    """The stages of an `towers.input_pipeline.Pipeline`, from the beginning."""
    # To fill a buffer takes time, and is no fault.
    pipeline = dataclasses.replace(pipeline, start_record=0, repeat=False, shuffle_mb=0)
    if pipeline.data_service is not None:
        return [("data service", pipeline.dataset())]
    # With threads of their own, as others may be busy for ever.
    options = pipeline.options()
    return [(name, data.with_options(options)) for name, data in pipeline.stages()]
