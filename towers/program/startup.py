"""Starts a program quietly, with a sentence if Ctrl-C ends it early.

Importing TensorFlow takes seconds. This module does not import it, so as to run before.

TensorFlow's log lines during the import pass through `grep`, and warnings remain.
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

# With a smaller address space, TensorFlow's threads may have no stacks.
_ADDRESS_SPACE = 4 * 2**30

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Flags are parsed later, and by absl.
_VERBOSITY = re.compile(r"--?v(?:erbosity)?(?:=(.*))?")
# The table of the devices reports a missing driver or GPU.
_NO_GPU = r"cuInit: .*(UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE)"
# TensorFlow 2.19 and 2.20 register plugins twice, and log that as an error.
_REGISTERED = r"Unable to register cu(FFT|DNN|BLAS) factory|placer already registered"
# Whether `begin` has lines dropped until the program ends.
_sifts = False
_COLOR = re.compile(r"\x1b\[[\d;]*m")
# In Keras's progress bar, only the color shows the remaining part.
_TO_COME = re.compile(r"\x1b\[37m(━*)\x1b\[0m")

_stderr = 2
# Whether `begin` has turned the garbage collector off.
_paused = False
# The argument of `leave`.
_exit_code: int | None = None


def begin(
    program: str,
    read: Callable[[Sequence[str]], T] = lambda argv: None,
    stopped: str = "Stopped by Ctrl-C.",
    sift: bool = True,
) -> T:
    """Reads the flags, then imports TensorFlow without its log lines at start.

    --verbosity=0, or more, shows TensorFlow's log lines, and so does
    TF_CPP_MIN_LOG_LEVEL=0 in the environment. Warnings and errors are always shown.
    Output has no color in files, nor on a terminal if NO_COLOR is set. The garbage
    collector is off until `end`. While TensorFlow is imported, a line or a bar says so.

    Args:
        program: Name of the program, such as "towers.train".
        read: Reads and checks the command line; raises a ValueError if it is wrong.
        stopped: Message if Ctrl-C ends the program before it calls `end`.
        sift: Whether to drop, until the program ends, TensorFlow's log lines of errors
            that Python raises.

    Returns:
        The result of `read`.

    Raises:
        SystemExit: The flags are wrong, or TensorFlow cannot be imported, with a
            message; or only the help was requested.
    """
    # Registered first, so that it is called last.
    forks.at_exit(_end_at_once)
    # Imports create 600,000 objects, which stay. Searching them for garbage again and
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
    # Shells ignore SIGINT in background jobs.
    defaults = signal.default_int_handler, signal.SIG_DFL
    if signal.getsignal(signal.SIGINT) in defaults:
        leave = functools.partial(_leave, f"{program}: {stopped}\n")
        forks.handle(signal.SIGINT, leave)
    try:
        flags_read = read(sys.argv)
        notes = [*keras_settings.ignored(), *versions.notes(), *_address_space_notes()]
    except ValueError as error:
        sys.exit(f"{program}: {' '.join(str(error).split())}")
    for note in notes:
        print(f"{program}: Note: {note}", file=sys.stderr)
    # Prints a traceback on a crash.
    faulthandler.enable(sys.__stderr__)
    prepare_gpus()
    may_compile = getattr(flags_read, "enable_xla", "false") != "false"
    _import_tensorflow(program, may_compile)
    return flags_read


def _address_space_notes() -> list[str]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit >= _ADDRESS_SPACE:
        return []
    return [
        f"This process may have {words.size(limit)} of address space (ulimit -v). "
        "TensorFlow reserves more than it uses, and aborts where it cannot; if it "
        "does, run: ulimit -v unlimited."
    ]


def _import_tensorflow(program: str, may_compile: bool) -> None:
    try:
        with (
            quiet(),
            progress.Progress("Importing TensorFlow", silent_s=progress.EARLY_S),
            contextlib.ExitStack() as contexts,
        ):
            keras_settings.override()
            import tensorflow as tf

            if may_compile:
                from towers.program import compilation_cache

                contexts.enter_context(compilation_cache.begun())
            tf.config.list_physical_devices()
    except ImportError as error:
        # TensorFlow's error adds the traceback to the reason.
        reason = " ".join(str(error.__context__ or error).split())
        sys.exit(
            f"{program}: TensorFlow cannot be imported ({reason}); ask python -m "
            "towers.doctor."
        )


def prepare_gpus() -> None:
    """Sets environment variables that CUDA and TensorFlow read once, as GPUs start.

    Variables that the user has set stay.
    """
    # CUDA then numbers the GPUs as nvidia-smi does.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # Each GPU gets two threads that launch its kernels. Otherwise launches wait for the
    # threads that decode images.
    os.environ.setdefault("TF_GPU_THREAD_MODE", "gpu_private")


def end() -> None:
    """Leaves Ctrl-C to the program, which now prints its own messages.

    The garbage collector ignores all objects that exist by now.
    """
    global _paused
    if _paused:
        gc.freeze()
        gc.enable()
        _paused = False
    if getattr(forks.handler_of(signal.SIGINT), "func", None) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(code: int) -> NoReturn:
    """Ends the program with an exit code, after all exit functions.

    Threads of TensorFlow may still run during its destructors, and the process then
    crashes at times, although all output is complete. So the destructors are skipped.
    """
    global _exit_code
    _exit_code = code
    forks.end_pools_at_exit()
    sys.exit(code)


def exit_code() -> int | None:
    """Returns the exit code with which `leave` ends the program, if it does."""
    return _exit_code


def _end_at_once():
    if _exit_code is None:
        return  # `leave` was not called.
    for stream in (sys.stdout, sys.stderr, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(_exit_code)


def quiet_import() -> contextlib.AbstractContextManager[None]:
    """Hides TensorFlow's log lines at start, where Towers imports it in Python.

    A log level that is set applies; otherwise, warnings and errors are shown.
    """
    if "tensorflow" in sys.modules:
        return contextlib.nullcontext()
    os.environ.setdefault(_LEVEL, "1")
    return quiet()


def quiet_gpus() -> contextlib.AbstractContextManager[None]:
    """Hides TensorFlow's line on a missing GPU or driver, in Python.

    The table of the devices reports that. TF_CPP_MIN_LOG_LEVEL=0 shows the line.
    """
    if os.environ.get(_LEVEL) == "0":
        return contextlib.nullcontext()
    return _sifted(_without(_NO_GPU))


def quiet_loading() -> contextlib.AbstractContextManager[None]:
    """Hides TensorFlow's log lines as it loads kept results of XLA, in Python.

    In programs, they are dropped until the end.
    """
    if os.environ.get(_LEVEL) == "0" or _sifts:
        return contextlib.nullcontext()
    return _sifted(_without(sieve.LOADING))


def quiet() -> contextlib.AbstractContextManager[None]:
    """Hides TensorFlow's log lines below TF_CPP_MIN_LOG_LEVEL, if that is above 0.

    TensorFlow itself applies the level only once it is initialised.
    """
    level = os.environ.get(_LEVEL, "")
    if not level.isdecimal() or int(level) == 0:
        return contextlib.nullcontext()
    below = "IWEF"[: int(level)]
    start = rf"^[{below}][0-9]{{4}} |^WARNING: All log messages before"
    return _sifted(_without(f"{start}|{_NO_GPU}|{_REGISTERED}"))


def _sift_from_now_on() -> None:
    """Drops TensorFlow's log lines of errors that Python raises as well.

    From here on, Python's own standard error is a separate file, which is not filtered.
    """
    if os.environ.get(_LEVEL, "0") == "0" or sys.stderr is not sys.__stderr__:
        return
    own = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    global _sifts
    _sifts = True
    sifted = _sifted([sys.executable, "-I", "-S", sieve.__file__])
    sifted.__enter__()
    forks.at_exit(sifted.__exit__, None, None, None)
    sys.stderr = own


def _without(unwanted: str) -> list[str | None]:
    """Returns a command that drops lines that match, and starts at once."""
    return [shutil.which("grep"), "--line-buffered", "-Ev", unwanted]


@contextlib.contextmanager
def _sifted(command: Sequence[str | None]) -> Iterator[None]:
    """Filters the lines that TensorFlow writes to the file of standard error.

    A separate process filters them, so that the last lines of a crash are shown.
    """
    global _stderr
    if not command[0] or sys.stderr is None:
        yield
        return
    sifting = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=2,
        process_group=0,  # Ctrl-C must not end it before all lines are written.
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
        # It would wait forever if a process that was started meanwhile stays.
        with contextlib.suppress(subprocess.TimeoutExpired):
            sifting.wait(timeout=1)


def _open_what_is_closed() -> None:
    """Opens standard streams that are closed, as by `>&-`, on the null device.

    Otherwise the next file that is opened would take the place of the stream.
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
    """A stream whose reader may end, such as `head`, or whose disk may be full.

    Further output is discarded. A run loses nothing by that: it continues to save, and
    to write its files.
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
        """Flushes the stream."""
        try:
            self.__wrapped__.flush()
        except OSError as error:
            self._write_to_nobody(error)

    def _write_to_nobody(self, error: OSError) -> None:
        # A reader that has ended knows that output is lost.
        self._self_lost = not isinstance(error, BrokenPipeError)
        if self.fileno() != _stderr and not isinstance(error, BrokenPipeError):
            message = f"The output cannot be written any more ({error.strerror}).\n"
            with contextlib.suppress(OSError):
                os.write(_stderr, message.encode())
        with open(os.devnull, "wb") as nobody:
            os.dup2(nobody.fileno(), self.fileno())


def is_lost(stream: Any) -> bool:
    """Returns whether output was lost, for example as the disk was full."""
    return getattr(stream, "_self_lost", False)


def outlive(stream: Any) -> Any:
    """Returns a stream that continues if writing fails; see `_Outlives`."""
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream  # No stream, or not a file.
    return _Outlives(stream)


class Plain(wrapt.ObjectProxy):
    """A stream that writes text without color; see https://no-color.org."""

    def write(self, text: str) -> int:
        """Writes a text, and returns its length."""
        text = _TO_COME.sub(lambda bar: "─" * len(bar[1]), text)
        return self.__wrapped__.write(_COLOR.sub("", text))


def _asks_for_more(argv: Sequence[str]) -> bool:
    """Returns whether --verbosity is 0, which is "info", or more."""
    for arg, following in itertools.pairwise([*argv, ""]):
        if match := _VERBOSITY.fullmatch(arg):
            value = following if match[1] is None else match[1]
            return value.isdecimal() or value in ("info", "debug")
    return False


def _leave(said: str, number: int, _) -> None:
    """Ends the process at once, as there is nothing to save yet."""
    os.write(_stderr, said.encode())
    os._exit(128 + number)
