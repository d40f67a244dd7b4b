"""Keeps what XLA compiles, so that the next start need not compile it again.

TensorFlow writes each result of XLA into a folder, and looks there before it compiles.
It renames a file when it is whole. But a call fails if a file is damaged or cannot be
written, no file is ever removed, and code would run that was compiled for other CPUs or
with other flags. So each process has a folder of its own. It begins with links to kept
results that are whole, and that the same versions made for the same devices:

    towers/xla/run-k3v9/NAME           TensorFlow's folder, of one process
    towers/xla/KIND/NAME.CHECKSUM      a kept result

What a process compiles is kept once a step has run. A link appears at once, so runs do
not wait for one another.
"""

import atexit
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import tensorflow as tf

from towers.keras_adapter import compilation, runtime
from towers.program import voice, words
from towers.program.user_folders import cache_folder

# Most bytes of kept results. As many must be free on the disk.
LIMIT_BYTES = 2**30
CHOICE = "TOWERS_XLA_CACHE"
CHOICES = "auto", "true", "false"
# A folder of a process that was killed is removed after a day. If the process still
# runs, TensorFlow creates the folder again.
_ABANDONED_S = 24 * 3600
_RUN = "run-"
_KEPT = re.compile(rf"(?P<name>{compilation.RESULT.pattern})\.(?P<sum>[0-9a-f]{{8}})")
# Beside TensorFlow's and XLA's own settings, one that changes results.
_SETTINGS = "XLA_", "TF_", "NVIDIA_TF32_OVERRIDE"
_NO_SETTINGS = "TF_CPP_", "TF_CONFIG", "TF_NUM_"
_DRIVER = "/proc/driver/nvidia/version"


class CompilationCache:
    """The results that are kept in a folder, and those of one process.

    Attributes:
        own: The folder of this process, for TensorFlow.
        linked: The names of the results in it that are kept, and the numbers of their
            files. TensorFlow replaces one that it compiles again.
    """

    def __init__(self, root: Path, limit: int = LIMIT_BYTES):
        """Makes a folder for this process.

        Args:
            root: The folder of all results.
            limit: Most bytes of kept results. The oldest are removed.

        Raises:
            OSError: The folder cannot be made, or the disk is almost full.
        """
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (free := shutil.disk_usage(root).free) < limit:
            raise OSError(f"only {words.size(free)} are left in {root}")
        self._root, self._limit = root, limit
        self._kept: Path | None = None
        self.linked: dict[str, int] = {}
        self._lock, self._process = threading.Lock(), os.getpid()
        self.own = Path(tempfile.mkdtemp(prefix=_RUN, dir=root))

    def use(self, kind: str) -> None:
        """Links kept results to this process's folder; only the first call does.

        Args:
            kind: Which results this process can use; see `kind`.
        """
        with self._lock:
            if self._kept is not None:
                return
            self._kept = self._root / kind
            try:
                self._remove_old()
                self._kept.mkdir(mode=0o700, exist_ok=True)
                damaged = self._link_kept()
            except OSError as error:
                voice.say(f"XLA's earlier results cannot be used: {error}.")
                return
        if damaged:
            voice.say(f"Removed damaged results of XLA in {self._kept}: {damaged}.")

    def _link_kept(self) -> int:
        """Returns the number of damaged results, which are removed."""
        damaged = 0
        for path in sorted(self._kept.iterdir()):
            if (match := _KEPT.fullmatch(path.name)) is None:
                continue
            # Another process may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if _checksum(path) != match["sum"]:
                    path.unlink()
                    damaged += 1
                    continue
                _link(path, self.own / match["name"])
                self._note(self.own / match["name"])
        return damaged

    def keep(self) -> None:
        """Keeps what this process has compiled since the last call."""
        with self._lock:
            if self._kept is None:
                return
            try:
                for path in self._compiled():
                    _link(path, self._kept / f"{path.name}.{_checksum(path)}")
                    self._note(path)
                self._remove_old()
            except OSError as error:
                voice.say(f"XLA's results cannot be kept: {error}.")

    def _compiled(self):
        paths = sorted(self.own.iterdir()) if self.own.is_dir() else ()
        return [
            path
            for path in paths
            if compilation.RESULT.fullmatch(path.name)
            and self.linked.get(path.name) != path.stat().st_ino
        ]

    def _note(self, path):
        self.linked[path.name] = path.stat().st_ino

    def drop(self) -> None:
        """Removes the kept results that this process has or began with."""
        with self._lock:
            if self._kept is None or not self.linked:
                return
            for name in self.linked:
                # It would be kept again at the end.
                (self.own / name).unlink(missing_ok=True)
                for path in self._kept.glob(f"{name}.*"):
                    path.unlink(missing_ok=True)
            count = words.count(len(self.linked), "result")
            self.linked.clear()
        voice.say(f"Removed {count} of XLA in {self._kept}, which may have failed.")

    def end(self) -> None:
        """Keeps what is left to keep, and removes this process's folder.

        In a process that this one has forked, it does nothing.
        """
        if os.getpid() != self._process:
            return
        self.keep()
        shutil.rmtree(self.own, ignore_errors=True)

    def _remove_old(self) -> None:
        """Removes the oldest results above the limit, and folders of killed runs."""
        files = []
        for path in self._root.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if not path.parent.name.startswith(_RUN):
                    files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._limit:
                break
            path.unlink(missing_ok=True)
            total -= size
        for folder in self._root.glob(f"{_RUN}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(folder, ignore_errors=True)


def _checksum(path: Path) -> str:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(2**20):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def _link(source: Path, target: Path) -> None:
    """Links a file, or copies it if the file system has no links."""
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except OSError:
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copyfile(source, unfinished)
        os.replace(unfinished, target)


def kind(environ: Mapping[str, str] = os.environ) -> str:
    """Returns a name for all that results of XLA depend on beside the function.

    These are versions, devices and settings. TensorFlow itself compares the function,
    and the shapes and types of its arguments.
    """
    threading_, experimental = tf.config.threading, tf.config.experimental
    gpus = tf.config.list_physical_devices("GPU")
    settings = {
        name: value
        for name, value in environ.items()
        if name.startswith(_SETTINGS) and not name.startswith(_NO_SETTINGS)
    }
    facts = [
        *(tf.__version__, tf.version.GIT_VERSION, platform.machine(), _cpu()),
        # XLA cuts loops for so many threads.
        *(len(os.sched_getaffinity(0)), threading_.get_intra_op_parallelism_threads()),
        runtime.is_deterministic(),
        experimental.tensor_float_32_execution_enabled(),
        [experimental.get_device_details(gpu) for gpu in gpus],
        _libraries_of_gpus() if gpus else None,
        sorted(settings.items()),
    ]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cpu() -> list[str]:
    """Returns the name and the abilities of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return [platform.processor()]
    telling = re.compile(r"(model name|flags|Features|CPU (?:part|implementer))\s*:")
    return sorted({line for line in lines if telling.match(line)})


def _libraries_of_gpus() -> list[str]:
    """Returns the versions of NVIDIA's driver and packages."""
    versions = sorted(
        f"{package.name} {package.version}"
        for package in importlib.metadata.distributions()
        if (package.name or "").startswith("nvidia-")
    )
    with contextlib.suppress(OSError):
        versions.append(Path(_DRIVER).read_text(errors="replace"))
    return versions


# The results of this process.
_cache: CompilationCache | None = None
_why_none = ""


@contextlib.contextmanager
def begun() -> Iterator[None]:
    """Has TensorFlow keep XLA's results, if it first lists its devices in the context.

    TensorFlow reads its flags then. They are as before at the end, so that programs
    that this one starts do not write into its folder. The variable TOWERS_XLA_CACHE
    says what is kept: "true" results for all devices, "false" none, and by default
    those for CPUs.
    """
    global _cache, _why_none
    before = os.environ.get(compilation.FLAGS, "")
    choice = os.environ.get(CHOICE, "auto")
    if choice not in CHOICES:
        voice.warn(f"Received {CHOICE}={choice}; expected one of {', '.join(CHOICES)}.")
    if choice == "false" or _cache is not None or compilation.keeps_results(before):
        yield
        return
    _why_none = ""
    if runtime.has_devices():
        _why_none = "TensorFlow was used before towers.configure()"
    elif before and not before.startswith("-"):
        _why_none = f"{compilation.FLAGS} names a file"
    else:
        try:
            _cache = CompilationCache(Path(cache_folder("xla")))
        except OSError as error:
            _why_none = str(error)
    if _cache is None:
        yield
        return
    atexit.register(_cache.end)
    flags = compilation.flags(str(_cache.own), only_cpus=choice != "true")
    os.environ[compilation.FLAGS] = f"{before} {flags}".lstrip()
    try:
        yield
    finally:
        os.environ[compilation.FLAGS] = before
        if not before:
            del os.environ[compilation.FLAGS]


def use() -> None:
    """Has kept results at hand, before XLA compiles a function."""
    global _why_none
    if _cache is not None:
        _cache.use(kind())
    elif _why_none:
        voice.say(f"XLA's results are not kept for the next start: {_why_none}.")
        _why_none = ""


def keep() -> None:
    """Keeps what XLA has compiled, after a step has run."""
    if _cache is not None:
        _cache.keep()


def doubt(error: tf.errors.OpError) -> None:
    """Removes kept results that may be why a step has failed, for the next start.

    Args:
        error: The error. Most errors are the model's, and remove nothing.
    """
    if _cache is not None and compilation.may_be_of_results(error):
        _cache.drop()


def has_any() -> bool:
    """Checks whether kept results are at hand."""
    return _cache is not None and bool(_cache.linked)
