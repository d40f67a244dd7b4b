"""What is measured on GPUs: which parts run, how they end, and what a profile tells."""

import json
import os
import subprocess
import sys
import time

import pytest

from scripts.bench import contenders
from scripts.bench.works import WORKS
from scripts.gpu_truth import page, parts, run, trace
from tests.limits import HANG_S
from towers.keras_adapter.runtime import XSpace

H200 = parts.Machine(1, "NVIDIA H200", 143_771, "580")
H100 = parts.Machine(1, "NVIDIA H100", 81_559, "580")
EIGHT = parts.Machine(8, "NVIDIA H100", 81_559, "580")


def _races(machine):
    for part in parts.of(machine):
        given = dict(
            text.removeprefix("--").split("=", 1)
            for text in part.command
            if text.startswith("--") and "=" in text
        )
        if "contenders" in given:
            yield part, given


@pytest.mark.parametrize("machine", [parts.Machine(), H100, H200, EIGHT])
def test_parts_name_what_there_is(machine):
    names = [part.name for part in parts.of(machine)]
    assert len(set(names)) == len(names)
    for part, given in _races(machine):
        assert given["work"] in WORKS
        for text in given["contenders"].split(","):
            kind = contenders.parse(text).kind
            assert not kind.works or given["work"] in kind.works, part.name


def test_only_as_many_race_as_fit_the_memory():
    for machine in (H100, H200):
        for _, given in _races(machine):
            count = len(given["contenders"].split(","))
            assert count >= 2
            assert count * 2 * int(given["gpu_memory_limit_mb"]) < machine.memory_mb
    racing = {
        machine: {
            name
            for part, given in _races(machine)
            if part.name.startswith("mlp")
            for name in given["contenders"].split(",")
        }
        for machine in (parts.Machine(), H100)
    }
    assert racing[H100] == racing[parts.Machine()]


def _part(name, code, limit_s=HANG_S, beside=False):
    return parts.Part(name, "a program", ("-c", code), limit_s, beside)


def test_parts_run_once_and_are_ended_at_their_limit(tmp_path):
    well = _part("well", "print('said')", beside=True)
    fails = _part("fails", "raise SystemExit(3)", beside=True)
    slow = _part("slow", "import signal; signal.pause()", limit_s=0.5)
    machine = parts.Machine()
    run.run(tmp_path, [well, fails], time.monotonic() + HANG_S)
    run.run(tmp_path, [slow], time.monotonic() + HANG_S)
    late = _part("late", "print('never')")
    run.run(tmp_path, [late], time.monotonic() + 1)
    assert (tmp_path / "well/log.txt").read_text() == "said\n"
    assert [run.is_done(tmp_path, each) for each in (well, fails, slow, late)] == [
        *(True, False, False, False)
    ]
    assert run.result(tmp_path, fails)["exit_code"] == 3
    assert run.result(tmp_path, slow)["exit_code"] is None
    page.write(tmp_path, [well, fails, slow, late], machine)
    rows = (tmp_path / "README.md").read_text()
    assert "| well | a program | well |" in rows
    assert "| fails | a program | code 3 |" in rows
    assert "| slow | a program | ended after 0 s |" in rows
    assert "| late | a program | not run | - |" in rows


def test_the_page_names_failed_tests_and_who_is_left_out(tmp_path):
    part = _part("tests", "")
    place = tmp_path / "tests"
    place.mkdir()
    (place / "junit.xml").write_text(
        '<testsuites><testsuite><testcase name="good"/><testcase name="bad">'
        '<failure message="assert 1 == 2&#10;more"/></testcase>'
        "</testsuite></testsuites>"
    )
    (place / "log.txt").write_text("jax is left out of mlp, 2 towers: no jax\n")
    page.write(tmp_path, [part], H200)
    said = (tmp_path / "README.md").read_text()
    assert "2 tests, 1 failed, 0 skipped." in said
    assert "- bad: assert 1 == 2\n" in said
    assert "jax is left out of mlp" in said


def _space():
    """Makes a profile of two streams: two kernels, and a copy that overlaps one."""
    space = XSpace()
    plane = space.planes.add(name="/device:GPU:0")
    for key, name in [(1, "gemm"), (2, "relu"), (3, "MemcpyH2D")]:
        plane.event_metadata[key].name = name
    plane.stat_metadata[7].name = "memcpy_details"
    plane.stat_metadata[8].name = "kind_src:pinned size:2000000 async:1"
    first = plane.lines.add(name="Stream #1(Compute)", timestamp_ns=1_000)
    second = plane.lines.add(name="Stream #2(MemcpyH2D)", timestamp_ns=1_000)
    plane.lines.add(name="XLA Ops").events.add(metadata_id=1, duration_ps=10**12)
    # In microseconds: 0 to 100, and 400 to 500; the copy from 50 to 150.
    for line, key, start, end in [
        (first, 1, 0, 100),
        (first, 2, 400, 500),
        (second, 3, 50, 150),
    ]:
        event = line.events.add(
            metadata_id=key,
            offset_ps=start * 10**6,
            duration_ps=(end - start) * 10**6,
        )
    event.stats.add(metadata_id=7, ref_value=8)
    space.planes.add(name="/host:CPU").lines.add(name="Stream of the host")
    return space


def test_a_profile_tells_of_gaps_launches_and_copies():
    found = trace.events(_space())
    assert list(found) == ["/device:GPU:0"]
    read = trace.read(found["/device:GPU:0"], steps=2)
    assert read["launches"] == 1
    assert read["span_ms"] == pytest.approx(0.25)
    assert read["computing_ms"] == pytest.approx(0.1)
    assert read["idle_ms"] == pytest.approx(0.125)
    assert read["copies"]["H2D"] == pytest.approx(
        {"count": 0.5, "mb": 1.0, "ms": 0.05, "ms_while_computing": 0.025}
    )
    (gap,) = read["largest_gaps"]
    assert gap == {"ms": 0.25, "after": "MemcpyH2D", "before": "relu"}
    assert [each["name"] for each in read["longest_kernels"]] == ["gemm", "relu"]


def test_an_unknown_part_is_said_in_a_line(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "scripts.gpu_truth", f"--output={tmp_path}/out"),
            "--parts=mlp,nothing",
        ],
        cwd=run.ROOT,
        env=os.environ | {"PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Received nothing; expected parts")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_part_is_run_once(tmp_path):
    name = "trace_mlp_towers_replicated"
    command = [
        *(sys.executable, "-m", "scripts.gpu_truth", f"--output={tmp_path}"),
        *(f"--parts={name}", "--minutes=5"),
    ]
    said = [
        subprocess.run(command, cwd=run.ROOT, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert f"{name}: exit code 0" in said[0]
    assert name not in said[1]
    assert json.loads((tmp_path / name / "trace.json").read_text()) == {}
