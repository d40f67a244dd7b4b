"""The checkpoints of one run: a thread writes them; the last and the best stay.

The thread writes from a copy of the state, so that training goes on meanwhile. Where
there is no room for one, training waits, and the thread reads each variable as it
writes it.

Only the first host writes here. Others have a temporary folder, as there may be no
shared file system; to restore, the first host sends them its checkpoint.
"""

import concurrent.futures
import contextlib
import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from towers.collectives.joined_hosts import this_host
from towers.lifecycle.checkpoints import saved_model, store
from towers.lifecycle.checkpoints.best import Best, Monitor, last_logs
from towers.lifecycle.checkpoints.store import Contents, OnDemand, Position
from towers.machine import limits
from towers.numerics.errors import NotFinite
from towers.program import locks, words
from towers.program.voice import say, warn

# Training goes on beside a copy of the state if so many times its size are free: once
# for the copy, and as much for the gradients and activations of a step.
_FREE_STATES = 2
_LOCK = "lock"


class SaveError(Exception):
    """A checkpoint could not be written; those before are as they were."""


class CheckpointManager:
    """The checkpoints of one run.

    Attributes:
        directory: Where they lie.
        monitor: The metric that tells which is the best.
        latest: Path of the last one that was read or written, if there is one.
        discarded: Paths of those that are removed when the next one is saved.
        after_save: Is called once one is written; it may raise an `OSError`.
    """

    def __init__(
        self,
        directory: str,
        keep_checkpoints: int,
        monitor: Monitor,
        on_save_error: str,
        background: bool | None = None,
    ) -> None:
        """Writes nothing yet; see `Checkpoint` for the arguments.

        Raises:
            ValueError: One of them is not as described.
        """
        if not isinstance(directory, str | os.PathLike):
            raise ValueError(f"Received directory={directory!r}; expected a path.")
        if type(keep_checkpoints) is not int or keep_checkpoints < 1:
            raise ValueError(
                f"Received keep_checkpoints={keep_checkpoints!r}; expected an integer "
                "of at least 1."
            )
        if on_save_error not in ("stop", "continue"):
            raise ValueError(
                f"Received on_save_error={on_save_error!r}; expected 'stop' or "
                "'continue'."
            )
        if not (background is None or isinstance(background, bool)):
            raise ValueError(
                f"Received background={background!r}; expected True, False or None."
            )
        self._received, self._background = None, background
        if self._hosts.index > 0:
            # Only the first host writes; it sends what it has.
            self._received = tempfile.TemporaryDirectory(prefix="towers-")
            directory = self._received.name
        self.directory = os.path.abspath(os.path.expanduser(directory))
        self.monitor, self._on_save_error = monitor, on_save_error
        self._keep = keep_checkpoints
        self.latest: str | None = None
        self.discarded: Sequence[str] = ()
        self.after_save: Callable[[], None] | None = None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving: concurrent.futures.Future | None = None
        self._trimming: concurrent.futures.Future | None = None
        self._scores: dict[str, float | None] = {}

    @property
    def _hosts(self):
        return this_host()

    def tell_latest(self, clause: str = "the last checkpoint is {}") -> str:
        """Says which checkpoint is the latest, if there is one, as a clause."""
        if self._received:
            return f"{self._hosts.names[0]} saves"
        return clause.format(self.latest) if self.latest else "nothing was saved yet"

    # Reading.

    def load(
        self, model: keras.Model, which: str
    ) -> tuple[str | None, Contents | None]:
        """Reads a checkpoint, which is the latest from now on.

        Args:
            model: Whose it is.
            which: See `Checkpoint.restore`.

        Returns:
            Its path and contents; `None` twice if there is none.

        Raises:
            ValueError: There are some, but none can be read, or is of this model.
        """
        path, contents = None, None
        if self._hosts.index > 0:
            path = self._hosts.send_files(None, self.directory)
            contents = path and store.load(path)
            if contents is not None:
                # A step of the model's own builds optimizers as late as it trains.
                saved_model.check_is_of(path, contents.about, model)
        elif which == "last":
            load = store.load
            path, contents = saved_model.newest_good(self.directory, load, model)
        else:
            path, contents = self._load_chosen(model, which)
        if self._hosts.index == 0:
            self._hosts.send_files(path, self.directory)
        self.latest = path
        if path is not None:
            self.monitor.recall(contents.about)
            if which != "last":
                position, found = store.position(path), store.find(self.directory)
                self.discarded = [p for p in found if store.position(p) > position]
        return path, contents

    def _load_chosen(self, model, which):
        path = os.path.abspath(os.path.expanduser(which))
        if which == "best":
            load = store.load_about
            last, about = saved_model.newest_good(self.directory, load, model)
            if last is None:
                return None, None
            self.monitor.recall(about)
            if (best := self.find_best(model, store.position(last))) is None:
                raise ValueError(
                    f"No checkpoint in {self.directory} has a value of "
                    f"{self.monitor.name}, so none is the best; expected the last "
                    "one, or the path of one."
                )
            path = best.path
        elif not store.is_one(path):
            raise ValueError(
                f"Received the checkpoint {which!r}; expected 'last', 'best' or the "
                f"path of one, such as {self.directory}/ckpt-1-0."
            )
        contents = store.load(path)
        saved_model.check_is_of(path, contents.about, model)
        return path, contents

    def find_best(self, model: keras.Model, position: Position) -> Best | None:
        """Returns the best checkpoint up to a position, if there is one.

        The model's metrics tell whether more is better. Raises a `ValueError` if they
        do not.
        """
        self.wait()
        scores = self._read_scores(self._up_to(position))
        if self.monitor.name is None or not any(
            score is not None for score in scores.values()
        ):
            return None
        self.monitor.settle(model)
        path = self.monitor.best(reversed(scores.items()))
        logs = last_logs(store.load_about(path))
        epoch = store.position(path).epoch
        return Best(path, epoch, self.monitor.name, scores[path], logs)

    def score(
        self, logs: Mapping[str, Any], validates: bool, model: keras.Model
    ) -> float | None:
        """Returns how good an epoch was; see `Monitor.score`."""
        before = self.monitor.name
        score = self.monitor.score(logs, validates, model)
        if self.monitor.name != before:
            self._scores.clear()
            if self.monitor.asked is None and self.monitor.name == "loss":
                say(
                    "Note: There is no validation data; the best checkpoint is that of "
                    "the lowest loss."
                )
        return score

    # Writing.

    def values(self, model: keras.Model) -> dict[str, list[Any]]:
        """Returns what is to be saved of a model; all hosts call it together.

        Hosts that write nothing get nothing.
        """
        if self._hosts.index == 0:
            return saved_model.values(model)
        saved_model.read_together(model)
        return {}

    def save(
        self,
        position: Position,
        contents: Contents,
        model: keras.Model,
        values: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Writes a checkpoint, or begins to; all hosts call it together.

        Only the first host writes.

        Args:
            position: Of the run.
            contents: What to write besides the model's variables.
            model: The model.
            values: What `values` has returned earlier; None for the values now.

        Raises:
            SaveError: It could not be written, or the one before could not.
            NotFinite: A variable is not finite.
        """
        self.wait()
        if self._trimming is not None:
            self._trimming.result()  # So that there are never two copies.
        if self._hosts.index > 0:
            if values is None:
                saved_model.read_together(model)
        elif values is not None or self._has_room_for_copy(model):
            values = self.values(model) if values is None else values
            self._begin_to_write(position, contents, values)
        else:
            values = saved_model.ValuesOnDemand(model)
            self._begin_to_write(position, contents, values.by_part)
            self.finish()
            # Other hosts take part in reading all, also where writing has failed.
            values.read_rest_together()
            self.wait()

    def _begin_to_write(self, position, contents, values):
        contents = Contents({**values, **contents.values}, contents.about)
        self._saving = self._writer.submit(self._write, position, contents)
        # It begins when that has ended, which frees the copy.
        self._trimming = self._writer.submit(_trim_heap)

    def _has_room_for_copy(self, model):
        """Tells whether training may go on while the state is written from a copy."""
        if self._background is None:
            size, free = saved_model.nbytes(model), limits.free_memory()
            if free < _FREE_STATES * size:
                self._background = False
                say(
                    "Note: Training waits while checkpoints are written: a copy of the "
                    f"state, of {words.size(size)}, has no room beside a step in the "
                    f"{words.size(free)} of free memory."
                )
        return self._background is not False

    def wait(self, only_if_done: bool = False) -> None:
        """Waits until what was saved is written, and says if it could not be.

        Args:
            only_if_done: Whether not to wait, but only to say so.

        Raises:
            SaveError: It could not be written, and that stops the run.
            NotFinite: A variable is not finite.
        """
        if self._saving is None or (only_if_done and not self._saving.done()):
            return
        saving, self._saving = self._saving, None
        try:
            saving.result()
        except OSError as error:
            saved = self.tell_latest("the last one is {}")
            text = f"Cannot save a checkpoint in {self.directory}: {error}; {saved}."
            if self._on_save_error == "stop":
                raise SaveError(text) from error
            warn(text)

    def finish(self) -> None:
        """Waits until what was saved is written, whatever became of it."""
        if self._saving is not None:
            concurrent.futures.wait([self._saving])

    def check_finite(
        self, values: Mapping[str, Sequence[Any]], about: Mapping[str, Any]
    ) -> None:
        """Checks that what is to be saved is finite.

        Args:
            values: Of the variables, by what they belong to.
            about: Describes them as "variables", and has the number of the "step".

        Raises:
            NotFinite: It is not.
        """
        checked = self._checked(values, about)
        for part in about["variables"]:
            for _ in checked[part]:
                pass

    def _checked(self, values, about):
        """The same values, each of which is checked when it is asked for."""

        def check(value, name):
            if not store.is_finite(value):
                saved = self.tell_latest("the last checkpoint, from before, is {}")
                raise NotFinite(
                    f"The variable {name} is not finite at step {about['step']}; "
                    f"{saved}. Look for such numbers in the data, or train with a "
                    "smaller learning rate."
                )
            return value

        def checked(of_part, described):
            names = [name for name, *_ in described]
            return OnDemand(lambda i: check(of_part[i], names[i]), range(len(of_part)))

        described = about["variables"]
        return {
            part: checked(of_part, described[part]) if part in described else of_part
            for part, of_part in values.items()
        }

    def _write(self, position, contents):
        if self.latest and not os.path.isdir(self.directory):
            raise OSError("the directory is gone")
        checked = self._checked(contents.values, contents.about)
        contents = Contents(checked, contents.about)
        path = store.save(self.directory, position, contents, self.discarded)
        for discarded in self.discarded:
            self._scores.pop(discarded, None)
        self.discarded = ()
        self._scores[path] = contents.about["score"]
        self._prune(position)
        if self.after_save is not None:
            self.after_save()
        self.latest = path

    def _prune(self, position):
        paths = self._up_to(position)
        scores = self._read_scores(paths)
        scored = {path for path, score in scores.items() if score is not None}
        if self.monitor.mode != "auto":
            scored = {self.monitor.best(reversed(scores.items()))}
        kept = [*scores][: self._keep]
        older = paths[paths.index(kept[-1]) + 1 :] if kept else ()
        for path in older:
            if path not in scored:
                store.remove(path)
                self._scores.pop(path, None)

    def _up_to(self, position):
        # Later ones were passed over, as damaged say, when the run was continued.
        found = store.find(self.directory)
        return [path for path in found if store.position(path) <= position]

    def _read_scores(self, paths):
        """Reads the scores of checkpoints that can be read."""
        for path in paths:
            if path not in self._scores:
                with contextlib.suppress(ValueError):
                    about = store.load_about(path)
                    self._scores[path] = self.monitor.read(about)
        return {path: self._scores[path] for path in paths if path in self._scores}


@contextlib.contextmanager
def alone(directory: str) -> Iterator[None]:
    """Makes a folder, and keeps other processes from saving there.

    A folder that is empty at the end is removed.

    Args:
        directory: The folder of the checkpoints.

    Raises:
        SaveError: Another process saves there, or the lock is another user's.
    """
    path = os.path.join(directory, _LOCK)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.made_folder(directory))
            stack.enter_context(locks.locked(path))
        except BlockingIOError as error:
            raise SaveError(
                f"Another run saves to {directory}; expected one at a time, so wait "
                "for its end, or choose another folder."
            ) from error
        except OSError as error:
            if os.path.lexists(path):
                raise SaveError(
                    f"Cannot lock {directory}: {error}; remove that file if no run "
                    "saves there, or choose another folder."
                ) from error
            # If no file can be made there, the first save says so.
        yield


def _trim_heap() -> None:
    """Gives memory that is free back to the system.

    glibc keeps freed blocks of up to 32 MB for the thread that had allocated them. A
    large state that changing threads copy and free again and again would take several
    times its size. Other C libraries keep less.
    """
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
