"""Requests for other towers, as files in the model_dir of a run.

`towers resize` writes a request, and the run writes an answer. Both are renamed into
place when they are whole. An answer names the request that it is for.

A port would need an address and a token. Whoever may write in the folder may ask; its
lock tells whether a run is there to answer.
"""

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from towers.program import locks, small_file, voice, whole_file

_REQUEST, _ANSWER, LOCK = "resize.json", "resize_answer.json", "lock"
FILES = (_REQUEST, _ANSWER)
"""What may be left in a model_dir."""
RATIOS = "split_ratios.json"
"""What --split_ratios=auto has found, in the model_dir."""
# The run looks between two calls of training, and the first call may take minutes.
_LOOK_S = 0.05
# A request names a number for each GPU at most.
_MOST_BYTES = 2**20


class RunError(ValueError):
    """The run has refused a request, or does not answer."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Other towers for a run.

    Attributes:
        key: What tells it from all others.
        num_gpus: How many GPUs; `None` where they are named.
        gpu_indices: Their numbers, as of `towers train`; empty where they are counted.
        split_ratios: How much of a batch each tower gets; empty for equal parts.
    """

    key: str
    num_gpus: int | None = None
    gpu_indices: tuple[int, ...] = ()
    split_ratios: tuple[int, ...] = ()

    @classmethod
    def new(cls, **asked: Any) -> "Request":
        """Makes a request that has a key of its own."""
        return cls(secrets.token_hex(8), **asked)


def is_running(model_dir: str) -> bool:
    """Tells whether a run has a model_dir locked, as it has until it ends, however."""
    return locks.is_locked(os.path.join(model_dir, LOCK))


def locked(model_dir: str) -> contextlib.AbstractContextManager[None]:
    """Inside, this process has a folder for itself.

    Args:
        model_dir: The folder, which has to be there.

    Raises:
        BlockingIOError: Another run has locked it.
        OSError: The lock cannot be made.
    """
    return locks.locked(os.path.join(model_dir, LOCK))


@contextlib.contextmanager
def answering(model_dir: str) -> Iterator[None]:
    """Inside, a run answers requests: the folder is locked, if not by the run already.

    Args:
        model_dir: The folder of the run.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(BlockingIOError):
            stack.enter_context(locked(model_dir))
        yield


def ask(model_dir: str, request: Request, seconds: float) -> Mapping[str, Any]:
    """Asks a run for other towers, and waits for its answer.

    Args:
        model_dir: The folder of the run.
        request: What to ask for.
        seconds: How long to wait.

    Returns:
        The answer; see `answer`.

    Raises:
        RunError: The run refuses, has ended, or does not answer in time.
        OSError: The request cannot be written.
    """
    _write(model_dir, _REQUEST, dataclasses.asdict(request))
    end = time.monotonic() + seconds
    while True:
        # In this order: a run answers that it takes a request, removes it, answers
        # again, and may end.
        alive, waits = is_running(model_dir), _read(model_dir, _REQUEST)
        found = _read(model_dir, _ANSWER) or {}
        taken = found.get("key") == request.key
        if taken and "refused" in found:
            raise RunError(found["refused"])
        if taken and "done" in found:
            return found
        others = waits is not None and waits.get("key") != request.key
        replaced = others and not taken
        if alive and not replaced and time.monotonic() < end:
            time.sleep(_LOOK_S)
            continue
        if replaced:
            raise RunError(
                f"Another request to {model_dir} came before the run saw this one; "
                "send one after another."
            )
        if not taken:
            with contextlib.suppress(OSError):
                os.remove(os.path.join(model_dir, _REQUEST))
        if not alive:
            raise RunError(
                f"The run in {model_dir} has ended, or has not begun to train; run "
                "towers train with the --num_gpus that it is to have."
            )
        if taken:
            raise RunError(
                f"The run in {model_dir} changes its towers, but came to no end of "
                f"their first step within {seconds:g} s; wait for its next line."
            )
        raise RunError(
            f"The run in {model_dir} did not answer within {seconds:g} s, in which it "
            "came to no end of a step; try again with a larger --wait_seconds."
        )


class Inbox:
    """The requests that a run is sent.

    Args:
        model_dir: The folder of the run.
    """

    def __init__(self, model_dir: str):
        self._model_dir = model_dir
        self._path = os.path.join(model_dir, _REQUEST)
        self._last: Request | None = None

    def take(self) -> Request | None:
        """Returns a request that was sent, once; `None` if there is none."""
        if not os.path.exists(self._path):
            return None
        request = _request(_read(self._model_dir, _REQUEST))
        # Where the file cannot be removed, it is there again.
        is_new = request is not None and request != self._last
        if is_new:
            self._last = request
            self.answer(request, taken=True)
        with contextlib.suppress(OSError):
            os.remove(self._path)
        return request if is_new else None

    def clear(self) -> None:
        """Removes what was sent to an earlier run."""
        for name in FILES:
            with contextlib.suppress(OSError):
                os.remove(os.path.join(self._model_dir, name))

    def answer(self, request: Request, **said: Any) -> None:
        """Answers a request.

        Args:
            request: The request.
            said: What to tell as JSON: `taken`, or `refused` or `done`, a sentence.
        """
        try:
            _write(self._model_dir, _ANSWER, {"key": request.key, **said})
        except OSError as error:
            # Training goes on: whoever asks is told that there was no answer.
            voice.warn(f"The answer to towers resize cannot be written: {error}.")


def _read(model_dir: str, name: str) -> dict[str, Any] | None:
    try:
        return small_file.read_json(os.path.join(model_dir, name), dict, _MOST_BYTES)
    except (FileNotFoundError, small_file.FileError):
        return None


def _request(found: dict[str, Any] | None) -> Request | None:
    """Makes a request of what a file has; `None` if nobody of ours has written it."""
    try:
        for name in ("gpu_indices", "split_ratios"):
            found[name] = tuple(found[name])
        request = Request(**found)
    except (TypeError, KeyError):
        return None
    return request if _is_whole(request) else None


def _is_whole(request: Request) -> bool:
    """Tells whether a request has the types and numbers that one of ours has."""
    count, numbers = request.num_gpus, (*request.gpu_indices, *request.split_ratios)
    return (
        isinstance(request.key, str)
        and (count is None) == bool(request.gpu_indices)
        and all(type(each) is int for each in (*numbers, count or 1))
        and (count is None or count >= 1)
        and min(request.gpu_indices, default=0) >= 0
        and min(request.split_ratios, default=1) >= 1
    )


def _write(model_dir: str, name: str, content: Mapping[str, Any]) -> None:
    whole_file.write_json(os.path.join(model_dir, name), content)
