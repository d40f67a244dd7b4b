"""What a process may use of a machine, with made-up control groups and a real one."""

import math
import os
import subprocess
import sys
import types

import psutil
import pytest

from tests.limits import HANG_S
from towers.input_pipeline.pipeline import room
from towers.machine import limits
from towers.machine.limits import Memory, Processors

GB = 2**30
# The tightest limit counts, of our own group or of one around it.
V1 = {
    "proc/self/cgroup": "4:memory:/a/b\n3:cpuset:/x\n1:cpu,cpuacct:/a/b\n0::/\n",
    "sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us": "600000\n",
    "sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "75000\n",
    "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": f"{3 * GB}\n",
    "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": f"{2 * GB}\n",
    "sys/fs/cgroup/memory/a/b/memory.stat": f"total_inactive_file {GB}\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{4 * GB}\n",
    "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{3 * GB}\n",
    "sys/fs/cgroup/memory/a/memory.stat": "total_inactive_file 0\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
}
V2 = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
    "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/a/b/memory.max": f"{3 * GB}\n",
    "sys/fs/cgroup/a/b/memory.current": f"{2 * GB}\n",
    "sys/fs/cgroup/a/b/memory.stat": f"anon 1\ninactive_file {GB}\n",
    "sys/fs/cgroup/a/memory.max": f"{4 * GB}\n",
    "sys/fs/cgroup/a/memory.current": f"{3 * GB}\n",
    "sys/fs/cgroup/a/memory.stat": "inactive_file 0\n",
}
# As in a container whose own group is the top of what it sees.
V2_CONTAINER = {
    "proc/self/cgroup": "0::/docker/of/the/host\n",
    "sys/fs/cgroup/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/memory.max": f"{3 * GB}\n",
    "sys/fs/cgroup/memory.current": f"{2 * GB}\n",
    "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
}


@pytest.fixture
def machine(monkeypatch):
    """A machine of 8 CPUs and 16 GB, of which 9 are free."""
    there = types.SimpleNamespace(available=9 * GB, total=16 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("files", [V1, V2, V2_CONTAINER], ids=["1", "2", "container"])
def test_the_tightest_limit_counts(machine, tmp_path, files):
    root = write(tmp_path, files)
    assert limits.processors(root) == Processors(8, 6, 1.5)
    assert limits.memory(root) == Memory(3 * GB, GB, limited=True)


@pytest.mark.parametrize("share", ["half", "0", "1.5", "nan"])
def test_a_share_of_the_memory_is_a_part(machine, tmp_path, monkeypatch, share):
    monkeypatch.setenv(limits.MEMORY_SHARE, share)
    with pytest.raises(ValueError, match=f"SHARE={share}; expected the part of the me"):
        limits.memory(tmp_path)


def test_without_limits(machine, tmp_path):
    found = limits.processors(tmp_path)
    assert found == Processors(8, 6, None)
    assert (found.count, found.seconds, found.note()) == (6, 6.0, "")
    assert limits.memory(tmp_path) == Memory(16 * GB, 9 * GB, limited=False)


def test_files_that_cannot_be_read_are_no_limit(machine, tmp_path):
    root = write(tmp_path, {**V2, "sys/fs/cgroup/a/cpu.max": "nonsense\n"})
    (root / "sys/fs/cgroup/a/memory.stat").unlink()
    assert limits.processors(root).quota is None
    # Of the two groups, that which can be read.
    assert limits.memory(root) == Memory(3 * GB, 2 * GB, limited=True)


@pytest.mark.parametrize(
    ("allowed", "quota", "count", "note"),
    [
        (2, 1.0, 1, "Threads: 1, as the container may use 1 of 2 CPUs."),
        (8, 2.5, 3, "Threads: 3, as the container may use 2.5 of 8 CPUs."),
        (8, 0.1, 1, "Threads: 1, as the container may use 0.1 of 8 CPUs."),
        (2, 4.0, 2, ""),
        (1, None, 1, ""),
    ],
)
def test_threads(allowed, quota, count, note):
    found = Processors(8, allowed, quota)
    assert (found.count, found.note()) == (count, note)


def test_the_input_stays_within_the_container(monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr(room, "THREADS", 3)
    monkeypatch.delenv(limits.MEMORY_SHARE, raising=False)
    found = [Memory(GB, GB // 2, True)]
    monkeypatch.setattr(limits, "_of_container", lambda *_: found[0])
    options = tf.data.Options()
    room.limit(options, 3)
    assert options.autotune.cpu_budget == 3
    assert options.threading.private_threadpool_size == 3
    assert options.autotune.ram_budget == GB // 8
    # A quarter of what it may take, however much is free.
    assert room.shuffle_mb(256) == 256
    assert room.shuffle_note(256) == ""
    assert room.shuffle_mb(300) == 256
    assert "has 256 MB instead of 300" in room.shuffle_note(300)
    # Of runs that share it, each takes its part; the order does not depend on that.
    monkeypatch.setenv(limits.MEMORY_SHARE, "0.5")
    room.limit(options, 3)
    assert options.autotune.ram_budget == GB // 16
    assert room.shuffle_mb(300) == 256
    monkeypatch.delenv(limits.MEMORY_SHARE)
    found[0] = Memory(GB, GB, False)
    options = tf.data.Options()
    room.limit(options, None)
    assert options.autotune.ram_budget is None
    assert room.shuffle_mb(10**6) == 10**6
    assert math.isinf(limits.share_of_container())


@pytest.mark.slow
def test_training_in_a_real_control_group(tmp_path):
    """As in a container of 1 of 2 CPUs and 2 GB."""
    from scripts.control_group import quota

    def train(cpus, name):
        with quota(cpus, 2048) as inside:
            script = "tests.towers.machine.operations_at_once"
            flags = [
                f"--model_dir={tmp_path / name}",
                f"--data_dir={tmp_path / 'data'}",
                *("--model=mlp", "--train_epochs=3", "--enable_xla=false"),
                "--variable_update=parameter_server",
            ]
            return subprocess.run(
                [*inside, sys.executable, "-m", script, *flags],
                capture_output=True,
                text=True,
                timeout=HANG_S,
            )

    try:
        limited = train(1, "limited")
    except OSError as error:
        pytest.skip(f"No control group can be made here: {error}")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("A quota of 1 CPU needs more than one.")
    free = train(None, "free")
    assert limited.returncode == free.returncode == 0, limited.stderr + free.stderr
    of = f"1 of {len(os.sched_getaffinity(0))} CPUs."
    assert f"Threads: 1, as the container may use {of}" in " ".join(
        limited.stdout.split()
    )
    assert "Threads:" not in free.stdout
    assert " 2048 MB  shared with the host" in limited.stdout
    threads = [int(done.stdout.splitlines()[-1]) for done in (limited, free)]
    # 0 is TensorFlow's own choice: as many as there are CPUs.
    assert threads == [1, 0]
