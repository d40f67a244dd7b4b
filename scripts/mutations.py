"""Measures whether the quick tests notice that the core is broken.

Each entry of scripts/mutations.toml changes a line or a few, so that programs still
run and give wrong results. In a copy of the working tree, the change is made, and the
tests run that are closest to it:

    found     a test fails, and passes without the change
    MISSED    all pass: a test is missing
    time out  they take too long
    gone      the text to change is not there, or not once: bring the table up to date
    broken    pytest fails and names no test, or a test that fails without the change

With `--json`, what an earlier run has found is not run again.

    python -m scripts.mutations --json=build/mutations.jsonl
    python -m scripts.mutations --only="the mean over towers"
    python -m scripts.mutations --check
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence

from tests import variants

ROOT = pathlib.Path(__file__).parents[1]
TABLE = pathlib.Path(__file__).with_suffix(".toml")
AREAS = "step", "reduction", "batch", "checkpoint", "pipeline"
FOUND, MISSED, TIME_OUT, GONE, BROKEN = "found", "MISSED", "time out", "gone", "broken"
# Also the cases that are quick in another turn.
QUICK = "not slow or other_turn"
UP_TO_DATE = "bring scripts/mutations.toml up to date with the code"

# Of pytest's summary: the first test that failed, also as it was set up. A file that
# cannot be imported is no test.
_FAILED = re.compile(
    r"^(?:FAILED|ERROR) (\S+\.py::[^\[\n]+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE
)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A change that breaks something.

    Attributes:
        name: Says what is broken.
        area: One of `AREAS`.
        file: Path in the repository.
        old: Text that is there once.
        new: What takes its place.
        tests: Paths of tests that should notice, the closest first.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def has(self, words: str) -> bool:
        """Tells whether its name, area or file has some words."""
        return words.lower() in f"{self.name}\n{self.area}\n{self.file}".lower()

    def of(self, text: str) -> str | None:
        """Changes the text of the file; `None` if it has no place, or several."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a mutation.

    Attributes:
        name: Its name.
        area: Its area.
        file: Its file.
        status: `FOUND`, `MISSED`, `TIME_OUT`, `GONE` or `BROKEN`.
        test: The first test that failed, or why nothing is known.
        seconds: How long the tests took.
    """

    name: str
    area: str
    file: str
    status: str
    test: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        about = f"{self.test}, {self.seconds:.0f} s" if self.test else ""
        about = about or f"{self.seconds:.0f} s"
        return f"{self.status:9} {self.area:10} {self.name} ({about})"


def read(path: pathlib.Path = TABLE) -> list[Mutation]:
    """Reads the table."""
    entries = tomllib.loads(path.read_text())["mutation"]
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def faults(mutations: Iterable[Mutation]) -> list[str]:
    """Says which mutations do not fit the code, a sentence each."""
    said = []
    for mutation in mutations:
        name, path = mutation.name, ROOT / mutation.file
        text = mutation.of(path.read_text()) if path.exists() else None
        if text is None:
            said.append(f"{name}: {mutation.file} has its text not once; {UP_TO_DATE}.")
            continue
        try:
            compile(text, mutation.file, "exec")
        except SyntaxError as error:
            said.append(f"{name}: {mutation.file} does not compile then: {error}.")
    return said


# Running.


def copy_tree(folder: pathlib.Path) -> None:
    """Copies the tracked files, as they are now; links stay links."""
    command = ["git", "ls-files", "-z"]
    names = subprocess.check_output(command, cwd=ROOT)
    for name in filter(None, os.fsdecode(names).split("\0")):
        source, target = ROOT / name, folder / name
        if not source.is_symlink() and not source.is_file():
            continue  # It was removed, or is another repository.
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def environ_of(folder: pathlib.Path) -> dict[str, str]:
    """Returns an environment in which Python imports what is in a folder.

    The tests that take turns are those of this commit, which the copy does not know.
    """
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [str(folder), before]))
    # A test that failed runs again without the change, and in the same way.
    return {**os.environ, "TOWERS_TURN": str(variants.TURN), "PYTHONPATH": path}


def check_imports(folder: pathlib.Path) -> None:
    """Checks that the package of a folder is the one that is imported there.

    Raises:
        RuntimeError: It is another one, such as that which is installed.
    """
    script = "import towers; from towers import input_pipeline"
    script += "; print(towers.__file__); print(input_pipeline.__file__)"
    command, environ = [sys.executable, "-c", script], environ_of(folder)
    printed = subprocess.check_output(command, cwd=folder, env=environ, text=True)
    for path in map(pathlib.Path, printed.splitlines()):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise RuntimeError(f"{path} is imported; expected one in {folder}.")


def run_tests(
    folder: pathlib.Path, tests: Sequence[str], timeout_s: float, *options: str
) -> tuple[int | None, str]:
    """Runs tests in a folder, until one fails.

    Returns:
        pytest's exit code, `None` if it took too long; and what it has printed.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    # In a file, as whoever outlives pytest would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, *options, *tests],
            cwd=folder,
            env=environ_of(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")


@contextlib.contextmanager
def changed(path: pathlib.Path, text: str) -> Iterator[None]:
    """Gives a file another text meanwhile, and then its own with its own time.

    Python compares this time to know whether what it has compiled is up to date.
    """
    before, stat = path.read_bytes(), path.stat()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


class Runner:
    """Runs the tests of mutations in a copy of the repository."""

    def __init__(self, folder: pathlib.Path, timeout_s: float):
        """Takes the copy, and how long tests may take."""
        self._folder, self._timeout_s = folder, timeout_s
        # Whether a test passes without any change, of those that had to be asked.
        self._passes: dict[str, bool] = {}

    def run(self, mutation: Mutation) -> Result:
        """Makes a change, and runs the tests that should notice."""
        path = self._folder / mutation.file
        text = mutation.of(path.read_text()) if path.exists() else None
        if text is None:
            return self._result(mutation, GONE, UP_TO_DATE)
        begun_s = time.monotonic()
        options = "-m", QUICK, "--numprocesses=2", "--dist=worksteal"
        with changed(path, text):
            code, said = run_tests(
                self._folder, mutation.tests, self._timeout_s, *options
            )
        seconds = time.monotonic() - begun_s
        status, test = self._read(code, said)
        return self._result(mutation, status, test, seconds)

    def _result(self, mutation, *about):
        return Result(mutation.name, mutation.area, mutation.file, *about)

    def _read(self, code, said):
        """Reads a status, and a test or a reason, from what pytest has printed."""
        if code is None:
            return TIME_OUT, ""
        if code == 0:
            return MISSED, ""
        # With -x, pytest-xdist's exit code is 2, as of an interruption.
        if (failed := _FAILED.search(said)) is None:
            last = said.rstrip().rpartition("\n")[2]
            return BROKEN, f"pytest's exit code is {code}: {last}"
        if not self._passes_unchanged(failed[1]):
            return BROKEN, f"without the change, too, this fails: {failed[1]}"
        return FOUND, failed[1]

    def _passes_unchanged(self, test):
        if test not in self._passes:
            code, _ = run_tests(self._folder, [test], self._timeout_s)
            self._passes[test] = code == 0
        return self._passes[test]


# Results.


def read_results(path: str | None) -> dict[str, Result]:
    """Reads what an earlier run has found, by names."""
    if path is None or not os.path.exists(path):
        return {}
    lines = pathlib.Path(path).read_text().splitlines()
    results = [Result(**json.loads(line)) for line in lines]
    return {result.name: result for result in results if result.status == FOUND}


def write_result(path: str | None, result: Result) -> None:
    """Appends a result to a file, if there is to be one."""
    if path is not None:
        with open(path, "a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def summary(results: Iterable[Result]) -> str:
    """Returns a Markdown table of what was found, and a list of what was missed."""
    results = [*results]
    counts = collections.Counter((result.area, result.status) for result in results)
    statuses = FOUND, MISSED, GONE, TIME_OUT, BROKEN
    lines = [f"| area | {' | '.join(map(str.lower, statuses))} |"]
    lines.append("|---" * (len(statuses) + 1) + "|")
    for area in AREAS:
        row = (str(counts[area, status]) for status in statuses)
        lines.append(f"| {area} | {' | '.join(row)} |")
    missed = [result for result in results if result.status == MISSED]
    lines += ["", "Missed:" if missed else "None was missed."]
    lines += [f"- {result.name} ({result.file})" for result in missed]
    return "\n".join(lines)


def run_all(mutations: Sequence[Mutation], given: argparse.Namespace) -> list[Result]:
    """Runs all mutations that an earlier run has not found; returns all results.

    Args:
        mutations: to run.
        given: the options of the command line.
    """
    known = read_results(given.json)
    results = [known[one.name] for one in mutations if one.name in known]
    # Whoever ends the run ends the tests that it has started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    temporary = tempfile.TemporaryDirectory(
        prefix="mutations-", dir=given.work_dir, ignore_cleanup_errors=True
    )
    with temporary as name:
        folder = pathlib.Path(name)
        copy_tree(folder)
        check_imports(folder)
        runner = Runner(folder, given.timeout_s)
        for mutation in mutations:
            if mutation.name not in known:
                results.append(runner.run(mutation))
                print(results[-1], flush=True)
                write_result(given.json, results[-1])
    return results


def main() -> None:
    """Checks the table, or runs what it lists."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", help="run those alone whose name, area or file has it"
    )
    parser.add_argument("--work_dir", help="folder in which the copy is made")
    parser.add_argument("--json", help="file to append a JSON line for each result to")
    parser.add_argument("--timeout_s", type=int, default=600, help="of the tests")
    parser.add_argument(
        "--check", action="store_true", help="only check that the table fits the code"
    )
    given = parser.parse_args()
    mutations = [mutation for mutation in read() if mutation.has(given.only)]
    if given.check:
        lines = faults(mutations)
        print("\n".join(lines) or f"{len(mutations)} mutations fit the code.")
        sys.exit(1 if lines else 0)
    print(summary(run_all(mutations, given)))


if __name__ == "__main__":
    main()
