"""Ends a run as SIGTERM does once this machine is about to be taken away."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import keras

from towers.elastic import notice
from towers.elastic.notice import NoticeError, NoticeSource
from towers.model import fit_call
from towers.model.fit_call import FitCall
from towers.processes.signals import Signals
from towers.program import forks, voice


class Lookout:
    """Looks for a notice in a thread. What cannot be told is said once, each."""

    def __init__(self, source: NoticeSource, noticed: Callable[[str], None]):
        """Looks for nothing yet.

        Args:
            source: Where to look.
            noticed: Is called with the first notice after a `start`, in the thread, and
                never after `end`.
        """
        self._source, self._noticed = source, noticed
        self._lock, self._over = threading.Lock(), threading.Event()
        self._said: set[str] = set()

    def start(self) -> None:
        """Begins to look, anew if there was a notice."""
        self.end()
        over = self._over = threading.Event()
        threading.Thread(
            target=self._look, args=(over,), name="towers-notice", daemon=True
        ).start()

    def end(self) -> None:
        """Looks no more. It waits for no answer."""
        with self._lock:
            self._over.set()

    def _look(self, over):
        while not over.is_set():
            try:
                what = self._source.look()
            except NoticeError as error:
                what = None
                self._say(str(error), over)
            if what is not None:
                with self._lock:
                    if not over.is_set():
                        self._noticed(what)
                return
            over.wait(self._source.every_s)

    def _say(self, text, over):
        if text in self._said or over.is_set():
            return
        self._said.add(text)
        again = f"asked again every {self._source.every_s:g} s"
        voice.warn(f"No notice of preemption can be had: {text}; {again}.")


@fit_call.changes_no_variable
class PreemptionNotice(keras.callbacks.Callback):
    """Ends the run as SIGTERM does once a notice says that the machine is to go.

    A thread looks for the notice while `fit` runs. A line then says what was noticed,
    and the process sends itself SIGTERM, once in a `fit`. With `Checkpoint` in the same
    list, the run is saved and ends with exit code 143, on all hosts. Without it,
    SIGTERM does what it does in the program.

    A machine that ends sends SIGTERM to its processes as well. That is no second one,
    which would end the run before it is saved: after a notice, `fit` ignores others.
    Ctrl-C twice ends it at once.
    """

    def __init__(self, where: str | os.PathLike[str]):
        """Looks for nothing before `fit`.

        Args:
            where: Where the notice comes from: the path of a file, which exists once
                the machine is to go; or "command:" and a line for the shell, which
                exits with code 0 then.

        Raises:
            ValueError: It is neither, or the folder of the file does not exist.
        """
        super().__init__()
        where = os.fspath(where)
        notice.check(where)
        self._lookout = Lookout(notice.source(where), self._stop)
        self._noticed = threading.Event()

    @contextlib.contextmanager
    def around_fit(self, call: FitCall) -> Iterator[None]:
        """Ends the thread, whatever ends `fit`."""
        try:
            yield
        finally:
            self._lookout.end()

    def on_train_begin(self, logs=None):
        """Begins to look: all that heeds a signal is in place."""
        self._noticed.clear()
        self._lookout.start()

    def on_train_batch_end(self, batch, logs=None):
        """Ignores further signals, before anything is saved."""
        self._ignore_others()

    def on_test_batch_end(self, batch, logs=None):
        """Ignores further signals, before anything is saved."""
        self._ignore_others()

    def _stop(self, what: str):
        voice.end_progress_bar()
        voice.say(f"Preemption notice: {what}. This process ends as by SIGTERM.")
        self._noticed.set()
        if not _has_heard():
            os.kill(os.getpid(), signal.SIGTERM)

    def _ignore_others(self):
        if not self._noticed.is_set() or not _has_heard():
            return
        if threading.current_thread() is threading.main_thread():
            # At the end of `fit`, `Signals` puts back what there was before.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _has_heard() -> bool:
    """Tells whether `fit` is about to stop for a signal already."""
    owner = getattr(forks.handler_of(signal.SIGTERM), "__self__", None)
    return isinstance(owner, Signals) and owner.stop is not None
