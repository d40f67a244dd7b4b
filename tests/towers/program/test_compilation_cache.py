"""Results of XLA: which are kept, which are used, and what a start does without them.

`second_start.py` is a start: a process that trains a small model on two towers.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S
from towers.program import compilation_cache
from towers.program.compilation_cache import CompilationCache

NAME = "xla_compile_cache__12__34__XLA_CPU_JIT.pb"
OTHER = "xla_compile_cache__12__56__XLA_CPU_JIT.pb"
KIND = "kind"
START = Path(__file__).with_name("second_start.py")


def _started(root, limit=10_000):
    cache = CompilationCache(root, limit)
    cache.use(KIND)
    return cache


def _compile(root, contents):
    """Makes a start that compiles, as TensorFlow does: the files are there at once."""
    cache = _started(root)
    for name, content in contents.items():
        (cache.own / name).write_bytes(content)
    cache.end()
    assert not cache.own.exists()


def _at_hand(cache):
    return {path.name: path.read_bytes() for path in cache.own.iterdir()}


def test_what_one_start_compiles_the_next_has_at_hand(tmp_path):
    _compile(tmp_path, {NAME: b"first", OTHER: b"second"})
    cache = _started(tmp_path)
    assert _at_hand(cache) == {NAME: b"first", OTHER: b"second"}
    # It is kept as soon as a step has run, in case the process is killed.
    (cache.own / NAME.replace("34", "78")).write_bytes(b"third")
    cache.keep()
    assert len(_at_hand(_started(tmp_path))) == 3


def test_each_kind_of_device_has_its_own_results(tmp_path):
    _compile(tmp_path, {NAME: b"first"})
    cache = CompilationCache(tmp_path, 1000)
    cache.use("another kind")
    assert not _at_hand(cache)


def test_only_whole_results_are_kept(tmp_path):
    unfinished = f"{NAME}vm-6d73ba28bb490884-16237-66191cc5549d2.tmp"
    _compile(tmp_path, {unfinished: b"ha", "notes": b"of a user's", NAME: b"whole"})
    assert _at_hand(_started(tmp_path)) == {NAME: b"whole"}


@pytest.mark.parametrize("damage", ["cut", "empty", "other bits", "another's content"])
def test_damaged_results_are_removed_and_said(tmp_path, capsys, damage):
    _compile(tmp_path, {NAME: b"first" * 9, OTHER: b"second" * 9})
    first, second = sorted((tmp_path / KIND).iterdir())
    content = first.read_bytes()
    first.write_bytes(
        {
            "cut": content[:-1],
            "empty": b"",
            "other bits": bytes([content[0] ^ 1]) + content[1:],
            "another's content": second.read_bytes(),
        }[damage]
    )
    (tmp_path / KIND / "README").write_text("A user's file stays, and is not linked.")
    assert _at_hand(_started(tmp_path)) == {OTHER: b"second" * 9}
    assert not first.exists() and (tmp_path / KIND / "README").exists()
    assert f"Removed damaged results of XLA in {tmp_path / KIND}: 1." in (
        capsys.readouterr().err
    )


def test_the_oldest_are_removed_above_the_limit(tmp_path):
    names = [NAME.replace("34", str(number)) for number in range(5)]
    _compile(tmp_path, dict.fromkeys(names, b"x" * 300))
    for path in (tmp_path / KIND).iterdir():
        age = int(path.name.split("__")[2])
        os.utime(path, (0, 1000 - age))  # the last is the oldest
    assert {*_at_hand(_started(tmp_path, limit=1000))} == {*names[:3]}
    assert len([*(tmp_path / KIND).iterdir()]) == 3


def test_two_at_once_keep_the_same_result_once(tmp_path):
    caches = [_started(tmp_path) for _ in range(2)]
    for cache in caches:
        (cache.own / NAME).write_bytes(b"same")
    for cache in caches:
        cache.end()
    assert len([*(tmp_path / KIND).iterdir()]) == 1
    assert _at_hand(_started(tmp_path)) == {NAME: b"same"}


def test_a_result_in_use_may_be_removed(tmp_path):
    _compile(tmp_path, {NAME: b"first"})
    cache = _started(tmp_path)
    shutil.rmtree(tmp_path / KIND)
    assert _at_hand(cache) == {NAME: b"first"}
    (cache.own / OTHER).write_bytes(b"second")
    cache.end()  # The folder of all is gone, which ends nothing.


def test_what_may_have_failed_is_not_kept_again(tmp_path):
    _compile(tmp_path, {NAME: b"first"})
    cache = _started(tmp_path)
    cache.drop()
    (cache.own / OTHER).write_bytes(b"second")
    cache.end()
    assert _at_hand(_started(tmp_path)) == {OTHER: b"second"}


def test_folders_of_killed_runs_are_removed_after_a_day(tmp_path):
    killed, running = (CompilationCache(tmp_path, 1000).own for _ in range(2))
    os.utime(killed, (0, 0))
    _started(tmp_path)
    assert not killed.exists() and running.exists()


def test_a_full_disk_is_no_place(tmp_path):
    with pytest.raises(OSError, match="are left in"):
        CompilationCache(tmp_path, 2**60)
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(
    not os.path.ismount("/dev/shm"), reason="there is no other file system"
)
def test_where_no_link_is_possible_files_are_copied(tmp_path):
    source = Path(f"/dev/shm/towers_test_{os.getpid()}")
    try:
        source.write_bytes(b"first")
        compilation_cache._link(source, tmp_path / NAME)
    finally:
        source.unlink()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == b"first"


def test_settings_make_another_kind():
    kinds = [
        compilation_cache.kind(environ)
        for environ in (
            {},
            {"TF_CPP_MIN_LOG_LEVEL": "1", "TF_CONFIG": "{}", "HOME": "/home"},
            {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"},
            {"TF_ENABLE_ONEDNN_OPTS": "0"},
        )
    ]
    assert kinds[0] == kinds[1] and len({*kinds}) == 3


# Whole starts.


def _environ(folder):
    environ = {k: v for k, v in os.environ.items() if k != compilation_cache.CHOICE}
    return environ | {"XDG_CACHE_HOME": str(folder)}


def _start(folder, *options, **environ):
    """Starts a process that trains; returns what it tells."""
    done = subprocess.run(
        [sys.executable, START, *options],
        env=_environ(folder) | environ,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"said": done.stderr}


def _kept(folder):
    return sorted((folder / "towers" / "xla").glob("*/*"))


def test_a_second_start_loads_what_the_first_compiled(tmp_path):
    first = _start(tmp_path)
    kept = _kept(tmp_path)
    # Both towers share one result; the update is the other.
    assert len(kept) == 2 and not first["loaded"]
    # Whatever is traced before, functions keep their names.
    second = _start(tmp_path, "--traces_before")
    assert second["loaded"] == [path.name.rpartition(".")[0] for path in kept]
    assert _kept(tmp_path) == kept
    assert second["weights"] == first["weights"]
    # What TensorFlow logs as it loads them is no error.
    assert "XlaSerializedCacheEntry" not in second["said"]
    assert "machine feature" not in second["said"]


@pytest.mark.slow
def test_without_results_at_hand_numbers_are_the_same(tmp_path):
    without = _start(tmp_path, TOWERS_XLA_CACHE="false")
    assert not _kept(tmp_path)
    assert without["weights"] == _start(tmp_path)["weights"]


@pytest.mark.slow
def test_damaged_results_end_no_run(tmp_path):
    first = _start(tmp_path)
    one, other = _kept(tmp_path)
    one.write_bytes(one.read_bytes()[:5000])
    other.write_bytes(os.urandom(other.stat().st_size))
    second = _start(tmp_path)
    assert "Removed damaged results of XLA" in second["said"]
    assert second["weights"] == first["weights"] and not second["loaded"]
    assert len(_start(tmp_path)["loaded"]) == 2


@pytest.mark.slow
def test_whole_results_of_another_function_end_no_run(tmp_path):
    _start(tmp_path)
    (one, first), (other, second) = (
        path.name.rsplit(".", 1) for path in _kept(tmp_path)
    )
    folder = _kept(tmp_path)[0].parent
    os.rename(folder / f"{one}.{first}", folder / "aside")
    os.rename(folder / f"{other}.{second}", folder / f"{one}.{second}")
    os.rename(folder / "aside", folder / f"{other}.{first}")
    told = _start(tmp_path, "--may_go_without")
    assert "which goes on without: " in told["said"]
    assert "Serialized cache key does not match" in told["said"]
    assert "Removed 2 results of XLA" in told["said"]
    # The next start compiles them again.
    assert not _start(tmp_path)["loaded"] and len(_start(tmp_path)["loaded"]) == 2


@pytest.mark.slow
def test_two_starts_at_once(tmp_path):
    commands = [
        subprocess.Popen(
            [sys.executable, START],
            env=_environ(tmp_path),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    told = [process.communicate(timeout=HANG_S)[0] for process in commands]
    assert [process.returncode for process in commands] == [0, 0]
    weights = [json.loads(text.splitlines()[-1])["weights"] for text in told]
    third = _start(tmp_path)
    assert len(third["loaded"]) == 2 and {*weights} == {third["weights"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--used_before", "TensorFlow was used before towers.configure()"),
        ("--folder_is_a_file", "Not a directory"),
    ],
)
def test_why_nothing_is_kept_is_said_once(tmp_path, option, why):
    if option == "--folder_is_a_file":
        (tmp_path / "towers").write_text("a file")
    told = _start(tmp_path, option)
    lines = [line for line in told["said"].splitlines() if "are not kept" in line]
    assert len(lines) == 1 and why in lines[0]
    assert not _kept(tmp_path)


@pytest.mark.slow
def test_flags_of_the_user_stay(tmp_path):
    own = tmp_path / "own"
    flags = f"--tf_xla_persistent_cache_directory={own}"
    assert _start(tmp_path, TF_XLA_FLAGS=flags)["flags"] == flags
    assert len([*own.iterdir()]) == 2 and not _kept(tmp_path)
    flags = "--tf_xla_deterministic_cluster_names=true"
    assert _start(tmp_path, TF_XLA_FLAGS=flags)["flags"] == flags
    assert len(_kept(tmp_path)) == 2


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
    command = [
        *(sys.executable, "-m", "towers.train", "--model=mlp", "--num_gpus=2"),
        *("--max_train_steps=2", "--enable_xla=true", "--eval_steps=1"),
        "--variable_update=parameter_server",
    ]
    kept = []
    for name in ("first", "second"):
        done = subprocess.run(
            [*command, f"--model_dir={tmp_path / name}"],
            env=_environ(tmp_path),
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == 0, done.stderr
        kept.append(_kept(tmp_path))
        assert "XlaSerializedCacheEntry" not in done.stderr
        assert "machine feature" not in done.stderr
    assert kept[0] and kept[0] == kept[1]
