"""The checkpoints of one run: a thread writes them; the last and the best stay."""

import concurrent.futures
import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from towers.cluster import process_group
from towers.collectives.hosts import this_host
from towers.lifecycle.checkpoints import saved_model, store
from towers.lifecycle.checkpoints.best import Best, Monitor
from towers.lifecycle.checkpoints.store import Contents, Position
from towers.numerics.not_finite import NotFinite
from towers.program.voice import say, warn


class SaveError(Exception):
    """A checkpoint could not be written; those before are as they were."""


class CheckpointManager:
    """The checkpoints of one run.

    Attributes:
        directory: Where they lie.
        monitor: The metric that tells which is the best.
        latest: Path of the last one that was read or written, if there is one.
        discarded: Paths of those that are removed when the next one is saved.
    """

    def __init__(
        self,
        directory: str,
        keep_checkpoints: int,
        monitor: Monitor,
        on_save_error: str,
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
        self._received = None
        # Where hosts come and go, each may have to write some day.
        self._elastic = process_group.member() is not None
        if self._hosts.index > 0 and not self._elastic:
            # Only the first host writes; it sends what it has.
            self._received = tempfile.TemporaryDirectory(prefix="towers-")
            directory = self._received.name
        self.directory = os.path.abspath(os.path.expanduser(directory))
        self.monitor, self._on_save_error = monitor, on_save_error
        self._keep = keep_checkpoints
        self.latest: str | None = None
        self.discarded: Sequence[str] = ()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving: concurrent.futures.Future | None = None
        self._scores: dict[str, float | None] = {}

    @property
    def _hosts(self):
        return this_host()

    def tell_latest(self, clause: str = "the last checkpoint is {}") -> str:
        """Says which checkpoint is the latest, if there is one, as a clause."""
        if self._received or self._hosts.index:
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
        if self._hosts.index > 0 and not self._elastic:
            path = self._hosts.send_files(None, self.directory)
            contents = path and store.load(path)
        elif which == "last":
            load = store.load
            path, contents = saved_model.newest_good(self.directory, load, model)
        else:
            path, contents = self._load_chosen(model, which)
        if self._hosts.index == 0 and not self._elastic:
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
        return Best(path, store.position(path).epoch, self.monitor.name, scores[path])

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

    def save(self, position: Position, contents: Contents) -> None:
        """Begins to write a checkpoint, once the one before is written.

        Only the first host writes.

        Raises:
            SaveError: The one before could not be written.
        """
        self.wait()
        if self._hosts.index == 0:
            self._saving = self._writer.submit(self._write, position, contents)

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
        for part, described in about["variables"].items():
            for value, (name, *_) in zip(values[part], described, strict=True):
                if not store.is_finite(value):
                    saved = self.tell_latest("the last checkpoint, from before, is {}")
                    raise NotFinite(
                        f"The variable {name} is not finite at step {about['step']}; "
                        f"{saved}. Look for such numbers in the data, or train with a "
                        "smaller learning rate."
                    )

    def _write(self, position, contents):
        self.check_finite(contents.values, contents.about)
        if self.latest and not os.path.isdir(self.directory):
            raise OSError("the directory is gone")
        while self.discarded:
            *self.discarded, path = self.discarded
            store.remove(path)
            self._scores.pop(path, None)
        path = store.save(self.directory, position, contents)
        self._scores[path] = contents.about["score"]
        self.latest = path
        self._prune(position)

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
        """Those of checkpoints that can be read."""
        for path in paths:
            if path not in self._scores:
                with contextlib.suppress(ValueError):
                    about = store.load_about(path)
                    self._scores[path] = self.monitor.read(about)
        return {path: self._scores[path] for path in paths if path in self._scores}
