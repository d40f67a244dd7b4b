"""How a program starts: quietly, and with a sentence if Ctrl-C ends it so early.

To import TensorFlow takes seconds. This module does without, to be there before.

TensorFlow's lines of the import pass through `grep`, and warnings stay.
"""

import contextlib
import faulthandler
import functools
import gc
import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import wrapt

from towers.keras_adapter import versions
from towers.program import forks, keras_settings, progress, sieve, words

T = TypeVar("T")

# With less, TensorFlow's threads may have no stacks.
_ADDRESS_SPACE = 4 * 2**30

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Flags are read later, and by absl.
_VERBOSITY = re.compile(r"--?v(?:erbosity)?(?:=(.*))?")
# That there is no driver or no GPU is told by the table of the devices.
_NO_GPU = r"cuInit: .*(UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE)"
# TensorFlow 2.19 and 2.20 register what they find twice, and say so as an error.
_REGISTERED = r"Unable to register cu(FFT|DNN|BLAS) factory|placer already registered"
_COLOR = re.compile(r"\x1b\[[\d;]*m")
# In Keras's progress bar, what is still to come is told by its color alone.
_TO_COME = re.compile(r"\x1b\[37m(━*)\x1b\[0m")

_stderr = 2
# Whether `begin` has turned the garbage collector off.
_paused = False
# What `leave` was told.
_exit_code: int | None = None


def begin(
    program: str,
    read: Callable[[Sequence[str]], T] = lambda argv: None,
    stopped: str = "Stopped by Ctrl-C.",
    sift: bool = True,
) -> T:
    """Reads the flags, then imports TensorFlow without what it says of its start.

    --verbosity=0, or more, shows what TensorFlow says, and so does an environment with
    TF_CPP_MIN_LOG_LEVEL=0. Warnings and errors are shown in any case. There is no color
    in files, nor on a terminal where NO_COLOR is set. No garbage is collected until
    `end`. While TensorFlow is imported, a line or a bar says so.

    Args:
        program: Its name, such as "towers.train".
        read: Reads and checks the command line, with a ValueError for what is wrong.
        stopped: What to say if Ctrl-C ends it before it calls `end`.
        sift: Whether to leave out, until the program ends, what TensorFlow writes of
            errors that Python raises.

    Returns:
        What `read` returns.

    Raises:
        SystemExit: The flags are wrong, or TensorFlow cannot be imported; either is
            said. Or only the help was asked for.
    """
    # First, to be called last.
    forks.at_exit(_end_at_once)
    # What imports make stays: 600,000 objects. To look for garbage in them again and
    # again, as Python does, takes a quarter of the time.
    global _paused
    _paused = gc.isenabled()
    gc.disable()
    _open_what_is_closed()
    if not _asks_for_more(sys.argv[1:]):
        os.environ.setdefault(_LEVEL, "1")
    if sift:
        _sift_from_now_on()
    if sys.stdout and (os.environ.get("NO_COLOR") or not sys.stdout.isatty()):
        sys.stdout = Plain(sys.stdout)
    sys.stdout, sys.stderr = map(outlive, (sys.stdout, sys.stderr))
    # It is ignored in the jobs that a shell runs in the background.
    ours = signal.default_int_handler, signal.SIG_DFL
    if signal.getsignal(signal.SIGINT) in ours:
        leave = functools.partial(_leave, f"{program}: {stopped}\n")
        forks.handle(signal.SIGINT, leave)
    try:
        found = read(sys.argv)
        notes = [*keras_settings.ignored(), *versions.notes(), *_address_space_notes()]
    except ValueError as error:
        sys.exit(f"{program}: {' '.join(str(error).split())}")
    for note in notes:
        print(f"{program}: Note: {note}", file=sys.stderr)
    # A crash says where.
    faulthandler.enable(sys.__stderr__)
    prepare_gpus()
    _import_tensorflow(program)
    return found


def _address_space_notes() -> list[str]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit >= _ADDRESS_SPACE:
        return []
    return [
        f"This process may have {words.size(limit)} of address space (ulimit -v). "
        "TensorFlow reserves more than it uses, and aborts where it cannot; if it "
        "does, run: ulimit -v unlimited."
    ]


def _import_tensorflow(program: str) -> None:
    try:
        with (
            quiet(),
            progress.Progress("Importing TensorFlow", silent_s=progress.EARLY_S),
        ):
            keras_settings.override()
            import tensorflow as tf

            tf.config.list_physical_devices()
    except ImportError as error:
        # TensorFlow's own adds the traceback to the reason.
        reason = " ".join(str(error.__context__ or error).split())
        sys.exit(
            f"{program}: TensorFlow cannot be imported ({reason}); ask python -m "
            "towers.doctor."
        )


def prepare_gpus() -> None:
    """Sets what CUDA and TensorFlow read of the environment once, as GPUs start.

    What the user has set stays.
    """
    # CUDA counts the GPUs as nvidia-smi does.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # Each GPU gets two threads that launch its kernels. Otherwise launches wait for the
    # threads that decode images.
    os.environ.setdefault("TF_GPU_THREAD_MODE", "gpu_private")


def end() -> None:
    """Leaves Ctrl-C to the program, which from here on has something to say itself.

    What there is by then is no longer looked through for garbage.
    """
    global _paused
    if _paused:
        gc.freeze()
        gc.enable()
        _paused = False
    if getattr(forks.handler_of(signal.SIGINT), "func", None) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(code: int) -> NoReturn:
    """Ends the program with an exit code, after all that is to be done at exit.

    Threads of TensorFlow may still run when its destructors do, and the process then
    crashes at times, although all is saved and said. So these are left out.
    """
    global _exit_code
    _exit_code = code
    forks.end_pools_at_exit()
    sys.exit(code)


def _end_at_once():
    if _exit_code is None:
        return  # somebody else ends the program
    for stream in (sys.stdout, sys.stderr, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(_exit_code)


def quiet_import() -> contextlib.AbstractContextManager[None]:
    """In Python, has TensorFlow say nothing of its start where Towers imports it.

    A level that is set counts; else, warnings and errors are shown.
    """
    if "tensorflow" in sys.modules:
        return contextlib.nullcontext()
    os.environ.setdefault(_LEVEL, "1")
    return quiet()


def quiet_gpus() -> contextlib.AbstractContextManager[None]:
    """In Python, leaves out TensorFlow's line that there is no GPU or no driver.

    The table of the devices says so. With TF_CPP_MIN_LOG_LEVEL=0 it is shown.
    """
    if os.environ.get(_LEVEL) == "0":
        return contextlib.nullcontext()
    return _sifted(_without(_NO_GPU))


def quiet() -> contextlib.AbstractContextManager[None]:
    """Leaves out what TensorFlow logs below TF_CPP_MIN_LOG_LEVEL, if that is above 0.

    TensorFlow itself does so only once it is initialised.
    """
    level = os.environ.get(_LEVEL, "")
    if not level.isdecimal() or int(level) == 0:
        return contextlib.nullcontext()
    below = "IWEF"[: int(level)]
    start = rf"^[{below}][0-9]{{4}} |^WARNING: All log messages before"
    return _sifted(_without(f"{start}|{_NO_GPU}|{_REGISTERED}"))


def _sift_from_now_on() -> None:
    """Leaves out what TensorFlow writes of errors that Python raises as well.

    Python's own standard error is another file from here on, with nothing left out.
    """
    if os.environ.get(_LEVEL, "0") == "0" or sys.stderr is not sys.__stderr__:
        return
    own = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    sifted = _sifted([sys.executable, "-I", "-S", sieve.__file__])
    sifted.__enter__()
    forks.at_exit(sifted.__exit__, None, None, None)
    sys.stderr = own


def _without(unwanted: str) -> list[str | None]:
    """A command that leaves out lines, and starts at once."""
    return [shutil.which("grep"), "--line-buffered", "-Ev", unwanted]


@contextlib.contextmanager
def _sifted(command: Sequence[str | None]) -> Iterator[None]:
    """Leaves out lines that TensorFlow writes to the file of standard error.

    They go through a process of its own, so that the last words of a crash are seen.
    """
    global _stderr
    if not command[0] or sys.stderr is None:
        yield
        return
    sifting = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=2,
        process_group=0,  # not to be ended by Ctrl-C before all is said
    )
    sys.stderr.flush()
    _stderr = os.dup(2)
    os.dup2(sifting.stdin.fileno(), 2)
    sifting.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(_stderr, 2)
        os.close(_stderr)
        _stderr = 2
        # For ever, if a process that was started meanwhile stays.
        with contextlib.suppress(subprocess.TimeoutExpired):
            sifting.wait(timeout=1)


def _open_what_is_closed() -> None:
    """Has what is written to a closed stream, as by `>&-`, written to nobody.

    Otherwise the next file that is opened would take its place.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, f"__{name}__") is None:
            nobody = os.open(os.devnull, os.O_RDWR)
            if nobody != number:
                os.dup2(nobody, number)
                os.close(nobody)
            stream = os.fdopen(number, "w" if number else "r", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class _Outlives(wrapt.ObjectProxy):
    """A stream whose reader may go, such as `head`, or whose disk may be full.

    The rest is written to nobody. A run loses nothing by that: it saves, and writes its
    files.
    """

    _self_lost = False

    def write(self, text: str) -> int:
        """Writes a text, and returns its length."""
        try:
            return self.__wrapped__.write(text)
        except OSError as error:
            self._write_to_nobody(error)
            return len(text)

    def flush(self) -> None:
        """Writes what is left to write."""
        try:
            self.__wrapped__.flush()
        except OSError as error:
            self._write_to_nobody(error)

    def _write_to_nobody(self, error: OSError) -> None:
        # Whoever has gone on purpose knows.
        self._self_lost = not isinstance(error, BrokenPipeError)
        if self.fileno() != _stderr and not isinstance(error, BrokenPipeError):
            said = f"The output cannot be written any more ({error.strerror}).\n"
            with contextlib.suppress(OSError):
                os.write(_stderr, said.encode())
        with open(os.devnull, "wb") as nobody:
            os.dup2(nobody.fileno(), self.fileno())


def is_lost(stream: Any) -> bool:
    """Tells whether a part of what was written is lost, as of a full disk."""
    return getattr(stream, "_self_lost", False)


def outlive(stream: Any) -> Any:
    """Returns a stream that goes on where nothing can be written; see `_Outlives`."""
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream  # none, or no file
    return _Outlives(stream)


class Plain(wrapt.ObjectProxy):
    """A stream that writes texts without color, as https://no-color.org asks for."""

    def write(self, text: str) -> int:
        """Writes a text, and returns its length."""
        text = _TO_COME.sub(lambda bar: "─" * len(bar[1]), text)
        return self.__wrapped__.write(_COLOR.sub("", text))


def _asks_for_more(argv: Sequence[str]) -> bool:
    """Tells whether --verbosity is 0, which is "info", or more."""
    for arg, following in itertools.pairwise([*argv, ""]):
        if found := _VERBOSITY.fullmatch(arg):
            value = following if found[1] is None else found[1]
            return value.isdecimal() or value in ("info", "debug")
    return False


def _leave(said: str, number: int, _) -> None:
    """Ends the process at once: there is nothing to lose yet."""
    os.write(_stderr, said.encode())
    os._exit(128 + number)
