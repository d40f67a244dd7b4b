"""Runs the blocks of a page, in order, in one folder.

All commands of a page are read by one bash, as in one terminal: what it sets, stays.
All Python of a page is one program, in a process that lives as long. A block with a
title is a file.
"""

import contextlib
import fcntl
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping

import psutil

from scripts.bench.mpirun import ALLOWED
from tests.documents import blocks, command, data, python, stand_in
from tests.documents.blocks import ROOT, Block

# Bash says in which line a command has failed; a block is a file that begins with as
# many empty lines as the page has before it.
_SHELL = """
set -eETo pipefail
declare -A started
trap 'started[${!:-0}]=' DEBUG
trap 'echo "line $LINENO: exit code $?: $BASH_COMMAND" >&2' ERR
while read -r file page <&{orders}; do
  source "$file"
  echo done >&{answers}
done
"""
# What a page has started with `&` ends by itself. Bash forgets jobs that have ended,
# but not the exit codes of their processes.
_WAIT = 'unset "started[0]"\nfor job in "${!started[@]}"; do wait "$job"; done\n'
# Names a session in the environment of all that it starts.
_SESSION = "TOWERS_DOCUMENTS_SESSION"
_LOOK_S = 0.2
# What is killed takes that long at most.
_END_S = 20
_SHOWN = 6000
_PORT = re.compile(r"(?:--port=|localhost:|127\.0\.0\.1:)(\d{4,5})\b")


class PageError(AssertionError):
    """A block of a page has failed."""


class Session:
    """A process that runs one block after another."""

    def __init__(self, words, folder: pathlib.Path, environ: Mapping[str, str]):
        """Starts it.

        Args:
            words: The command; `{orders}` and `{answers}` are descriptors in it.
            folder: Where it works.
            environ: Its environment.
        """
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        numbers = {"{orders}": str(orders), "{answers}": str(answers)}
        for name, number in numbers.items():
            words = [word.replace(name, number) for word in words]
        self._own = uuid.uuid4().hex
        self.output = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**environ, _SESSION: self._own},
            pass_fds=(orders, answers),
            # What it leaves behind ends with it.
            start_new_session=True,
        )
        os.close(orders)
        os.close(answers)

    def do(self, file: pathlib.Path, page: pathlib.Path, deadline: float) -> str | None:
        """Runs a file.

        Args:
            file: The code.
            page: The page that it is from.
            deadline: When to give up, by `time.monotonic`.

        Returns:
            What is wrong, or `None`.
        """
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, f"{file}\t{page}\n".encode())
        while time.monotonic() < deadline:
            ready, _, _ = select.select([self._answers], [], [], _LOOK_S)
            if ready and os.read(self._answers, 100):
                return None
            if (code := self._process.poll()) is not None:
                return f"has ended with exit code {code}"
        return "is not done in time"

    def said(self) -> str:
        """Returns the end of what it has written."""
        # Others write on at the end of the file.
        text = os.pread(self.output.fileno(), 1 << 24, 0).decode(errors="replace")
        return text[-_SHOWN:]

    def close(self) -> None:
        """Ends it, and all that it has started."""
        started = [p for p in psutil.process_iter() if self._has_started(p)]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # `setsid`, and some programs, begin groups of their own.
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        # Their ports are free then.
        psutil.wait_procs(started, timeout=_END_S)
        os.close(self._orders)
        os.close(self._answers)
        self.output.close()

    def _has_started(self, process):
        try:
            if os.getpgid(process.pid) == self._process.pid:
                return True
            deadline = time.monotonic() + _END_S
            while _is_in_exec(process) and time.monotonic() < deadline:
                time.sleep(0.001)
            return process.environ().get(_SESSION) == self._own
        except (ProcessLookupError, psutil.Error):
            return False


def _is_in_exec(process):
    """Tells whether a process is about to run a program, and has no environment yet.

    For a moment, Linux has neither arguments nor environment of it, but its file.
    """
    return not (process.environ() or process.cmdline()) and bool(process.exe())


def run_page(path: pathlib.Path, folder: pathlib.Path, limit_s: float) -> list[str]:
    """Runs a page of the checkout in an empty folder, with made-up data.

    Args:
        path: The page.
        folder: Where.
        limit_s: Most seconds for all of it.

    Returns:
        A line for each block: where it is, and how long it took.

    Raises:
        PageError: A block has failed; says which line of the page, and what was said.
    """
    work = folder / "work"
    work.mkdir()
    data.make(work)
    return run(blocks.read(path), work, limit_s, ROOT)


def run(
    page: list[Block], work: pathlib.Path, limit_s: float, root: pathlib.Path = ROOT
) -> list[str]:
    """Runs the blocks of a page, in order.

    Args:
        page: All its blocks.
        work: The folder in which they run.
        limit_s: Most seconds for all of it.
        root: The folder from which the paths of pages are.

    Returns:
        A line for each block: where it is, and how long it took.

    Raises:
        PageError: A block has failed.
    """
    with tempfile.TemporaryDirectory() as own, _ports_of(page), _Sessions() as sessions:
        folder = pathlib.Path(own)
        environ = _environ(page, folder / "bin")
        deadline = time.monotonic() + limit_s
        said = []
        for number, block in enumerate(page):
            if block.title and block.language in blocks.LANGUAGES:
                _write(block, work)
            if not block.runs:
                continue
            began = time.monotonic()
            session = sessions.of(block, work, environ)
            file = folder / f"{number}.{block.language}"
            file.write_text("\n" * (block.line - 1) + _short(block))
            fault = session.do(file, root / block.page, deadline)
            if fault:
                raise PageError(_failed(block, fault, session.said(), limit_s))
            took = time.monotonic() - began
            said.append(f"{block.where} {block.language} {took:.1f} s")
        if shell := sessions.running.get("bash"):
            file = folder / "wait"
            file.write_text(_WAIT)
            if fault := shell.do(file, root, deadline):
                last = [block for block in page if block.runs][-1]
                fault = f"leaves a command in the background, which {fault}"
                raise PageError(_failed(last, fault, shell.said(), limit_s))
    return said


class _Sessions:
    """The processes of a page, by language."""

    def __init__(self):
        self.running: dict[str, Session] = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for session in self.running.values():
            session.close()

    def of(self, block, work, environ) -> Session:
        """Returns the process for a block, and starts it if there is none."""
        if block.program == "new" and block.language in self.running:
            self.running.pop(block.language).close()
        if block.language not in self.running:
            words = ["bash", "-c", _SHELL]
            if block.language == "python":
                module = "tests.documents.interpreter"
                words = [sys.executable, "-m", module, "{orders}", "{answers}"]
            self.running[block.language] = Session(words, work, environ)
        return self.running[block.language]


def _environ(page, own_bin):
    stand_in.install(own_bin)
    lines = [
        words
        for block in page
        if block.language == "bash" and block.runs
        for words in blocks.commands(block.code)
    ]
    path = own_bin, pathlib.Path(sys.executable).parent, os.environ["PATH"]
    return {
        **os.environ,
        **ALLOWED,  # of mpirun, for root
        "PATH": os.pathsep.join(map(str, path)),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        stand_in.RESIZED: os.pathsep.join(command.resized(lines)),
    }


def _short(block):
    return python.shorten(block.code) if block.language == "python" else block.code


def _write(block, work):
    path = work / block.title
    if not path.resolve().is_relative_to(work.resolve()):
        raise PageError(f"{block.where}: {block.title} leads out of the folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_short(block))


def _failed(block, fault, said, limit_s):
    """Says what has failed, and where."""
    lines = re.findall(r"^line (\d+): (.*)$", said, re.MULTILINE)
    inner = re.findall(rf'File ".*{re.escape(block.page)}", line (\d+)', said)
    where = lines[0][0] if lines else (inner[-1] if inner else block.line)
    what = lines[0][1] if lines else f"the {block.language} block"
    return (
        f"{block.page}:{where}: {what} {fault} (a page has {limit_s:.0f} s).\n"
        f"--- the block, from line {block.line} ---\n{block.code}"
        f"--- the end of what the page has said ---\n{said}"
    )


@contextlib.contextmanager
def _ports_of(page) -> Iterator[None]:
    """Keeps other pages from the ports that this one names, as they run at once."""
    ports = {port for block in page if block.runs for port in _PORT.findall(block.code)}
    with contextlib.ExitStack() as locks:
        for port in sorted(ports):
            name = os.path.join(tempfile.gettempdir(), f"towers-documents-{port}")
            lock = locks.enter_context(open(name, "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
