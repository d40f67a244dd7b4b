"""The launcher: what it starts, what it does when a host fails, and what is left."""

import json
import os
import pty
import queue
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.limits import HANG_S
from tests.terminal import read_all
from tests.towers.launch.launching import ROOT, launch
from tests.variants import slow
from towers.launch import arguments, generation, gpus, supervisor
from towers.launch.machine import Machine, made_log_dir
from towers.processes import child
from towers.processes.strays import Strays
from towers.program.ending import ANOTHER_FAILED

FOREVER = "import signal; signal.pause()"
RANK = "import os; rank = int(os.environ['TOWERS_HOST_RANK']); "


@pytest.fixture
def launched(tmp_path, capfd, monkeypatch):
    """Launches hosts that run some Python; returns the exit code and what was said."""
    machines = []

    def launch(code, hosts=2, told=None, **options):
        command = sys.executable, "-S", "-c", code
        asked = arguments.LaunchOptions(
            hosts, hosts, command, **{"log_dir": str(tmp_path), **options}
        )
        environ = {**os.environ, "TOWERS_TOKEN": "a secret of all hosts"}
        machines.append(Machine(asked, environ))
        one = supervisor.Supervisor(asked, machines[-1])
        for event in told or ():
            one.events.put(event)
        return one.run(), capfd.readouterr()

    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 0)
    yield launch
    for machine in machines:
        assert not machine.strays.processes()
        machine.strays.end(0)


def read(options, *command):
    return arguments.read([*options.split(), *command], "It launches.")


# What is started.


@pytest.mark.slow
@pytest.mark.parametrize("devices", [("--num_gpus=1",), ()])
def test_two_hosts_train_into_one_folder(tmp_path, devices):
    """By default, each host divides its CPU, before TensorFlow connects the hosts."""
    with launch(
        *("--hosts=2", f"--log_dir={tmp_path / 'logs'}", "--"),
        *("--dataset=synthetic:8x8x1:10:64", "--model=mlp", *devices),
        *("--train_epochs=1", f"--model_dir={tmp_path / 'run'}"),
    ) as process:
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert (tmp_path / "run" / "summary.json").exists()


def test_each_host_has_its_place_and_its_output(launched, tmp_path):
    code, (out, err) = launched(
        "import os, sys, json\n"
        "found = {k: v for k, v in os.environ.items() if k.startswith('TOWERS_')}\n"
        "print(json.dumps(found))\n"
        "print('an error', file=sys.stderr)",
        hosts=3,
    )
    assert code == 0
    texts = [out, *((tmp_path / f"host{k}.log").read_text() for k in (1, 2))]
    found = [json.loads(text.splitlines()[0]) for text in texts]
    assert [each.pop("TOWERS_HOST_RANK") for each in found] == ["0", "1", "2"]
    assert found[0] == found[1] == found[2]
    assert found[0]["TOWERS_HOST_COUNT"] == "3"
    assert found[0]["TOWERS_COORDINATOR"].startswith("127.0.0.1:")
    assert len(found[0]["TOWERS_TOKEN"]) == 32  # not the user's own
    assert texts[1].splitlines()[1] == "an error" and out.count("\n") == 1
    first, *lines = err.splitlines()
    assert first == (
        "towers.launch: Starting 3 hosts on this machine; the output of hosts other "
        f"than the first is in {tmp_path}/host1.log to host2.log."
    )
    assert sorted(lines) == ["[host 1] an error", "[host 2] an error", "an error"]


def test_one_host_of_several_machines(launched):
    code, (out, err) = launched(
        RANK + "print(rank, os.environ['TOWERS_COORDINATOR'], "
        "os.environ['TOWERS_INTERFACE'], os.environ['TOWERS_TOKEN'])",
        hosts=4,
        host_rank=2,
        coordinator="node0:8476",
        interface="eth0",
        log_dir=None,
    )
    assert (code, out) == (0, "2 node0:8476 eth0 a secret of all hosts\n")
    assert err == "towers.launch: Starting host 2 of 4.\n"


def test_logs_of_an_earlier_launch_stay(launched, tmp_path):
    for _ in range(2):
        launched("print('x')")
    assert (tmp_path / "host1.log").read_text() == "x\nx\n"


@pytest.mark.parametrize(
    ("environ", "hosts", "each", "found"),
    [
        ("", 2, None, [[], []]),
        ("-1", 2, None, [[], []]),
        ("0,1,2,3", 2, None, [["0", "1"], ["2", "3"]]),
        ("0,1,2,3", 3, None, [["0"], ["1"], ["2"]]),
        ("3, 1,GPU-5", 3, 1, [["3"], ["1"], ["GPU-5"]]),
        ("0,1,-1,2", 2, 1, [["0"], ["1"]]),
    ],
)
def test_gpus_are_divided(environ, hosts, each, found):
    assert gpus.divide(hosts, each, {"CUDA_VISIBLE_DEVICES": environ}) == found


@pytest.mark.parametrize(("hosts", "each"), [(4, None), (2, 2)])
def test_too_few_gpus(hosts, each):
    with pytest.raises(ValueError, match=r"but 3 GPUs to divide; expected fewer"):
        gpus.divide(hosts, each, {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_a_host_sees_its_gpus(launched, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    _, (out, err) = launched(code)
    assert out + (tmp_path / "host1.log").read_text() == "4,5\n6,7\n"
    assert "2 hosts on this machine, with the GPUs 4+5, 6+7; the" in err


# When one fails.


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("raise SystemExit(3)", 3, "exit code 3"),
        ("os.kill(os.getpid(), 9)", 137, "SIGKILL"),
        slow("os.abort()", 134, "SIGABRT"),
    ],
)
def test_the_first_to_fail_is_named(launched, tmp_path, end, code, how):
    found, (_, err) = launched(
        RANK + f"\nif rank == 1: {end}\nraise SystemExit({ANOTHER_FAILED})"
    )
    assert found == code
    said = rf"Host 1 \(pid \d+\) failed first: {how} \(see {tmp_path}/host1.log\)\."
    assert re.search(said, err)


def test_memory_is_named_where_the_kernel_says_so(launched, monkeypatch):
    counts = iter([5, 5, 6])
    monkeypatch.setattr(child, "_killed_for_memory", lambda: next(counts))
    _, (_, err) = launched(RANK + "os.kill(os.getpid(), 9) if rank else None")
    assert "failed first: SIGKILL, by the kernel for want of memory (see" in err


def test_the_kernels_count_is_read():
    assert child._killed_for_memory() >= 0
    if Path("/proc/vmstat").exists():
        assert "oom_kill " in Path("/proc/vmstat").read_text()


def test_hosts_that_do_not_end_are_ended(launched):
    code, (_, err) = launched(
        RANK + f"\nif rank == 1: raise SystemExit(7)\n{FOREVER}", fail_seconds=0.05
    )
    assert code == 7 and "Host 1 (pid" in err and "exit code 7" in err


def test_a_host_that_hears_nothing_is_killed(launched, monkeypatch):
    monkeypatch.setattr(generation, "TERM_SECONDS", 0.05)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code, (_, err) = launched(
        RANK + f"\nif rank: raise SystemExit({ANOTHER_FAILED})\n{deaf}; {FOREVER}",
        fail_seconds=0.3,
    )
    # Nobody but the one that stands still is to blame.
    assert re.search(
        r"Host 0 \(pid \d+\) did not end within 0.3 s after another host had found a "
        r"failure, and was ended\.",
        err,
    )
    assert code in (137, 143)


STOPS = """
if rank:
    with open("pid.new", "w") as file: print(os.getpid(), file=file)
    os.rename("pid.new", "pid")
    os.kill(os.getpid(), 19)
else:
    while not os.path.exists("pid"): pass
    pid = int(open("pid").read())
    while ") T " not in open(f"/proc/{pid}/stat").read(): pass
raise SystemExit(75)
"""


def test_a_host_that_was_stopped_goes_on_to_its_end_and_is_named(
    launched, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code, (_, err) = launched(RANK + STOPS, fail_seconds=HANG_S)
    assert code == ANOTHER_FAILED
    assert re.search(r"Host 1 \(pid \d+\) stood still, stopped as by SIGSTOP, ", err)


def test_nothing_that_a_host_started_outlives_it(launched, monkeypatch, tmp_path):
    """Not even a session of its own; the fixture looks."""
    monkeypatch.setattr(generation, "LAST_WORDS_S", 0.05)
    child = [sys.executable, "-SE", "-c", FOREVER]
    code, _ = launched(
        f"import subprocess; subprocess.Popen({child}, start_new_session=True); "
        f"subprocess.Popen({child})"
    )
    assert code == 0


def test_another_generation_starts(launched, tmp_path):
    code, (out, err) = launched(
        RANK + "generation = os.environ['TOWERS_GENERATION']; print(generation)\n"
        "if generation != '2': raise SystemExit(5 if rank else 75)",
        max_restarts=3,
    )
    assert (code, out) == (0, "0\n1\n2\n")
    assert (tmp_path / "host1.log").read_text() == out
    assert err.count("Host 1 (pid ") == 2
    assert "All hosts start again in 0 s (restart 2 of 3)." in err


def test_restarts_end(launched):
    code, (out, _) = launched(RANK + "print(rank); raise SystemExit(5)", max_restarts=2)
    assert (code, out) == (5, "0\n" * 3)


@pytest.mark.parametrize("end", [2, 143, slow(130), slow(0)])
def test_these_ends_are_final(launched, end):
    code, (out, _) = launched(
        RANK + f"print(rank); raise SystemExit({end})", max_restarts=2
    )
    assert (code, out) == (end, "0\n")


def test_a_signal_forbids_a_restart():
    events = queue.SimpleQueue()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        events.put(number)
    assert supervisor.pause(events, 1, 3) == signal.SIGTERM


def test_a_folder_of_logs_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = made_log_dir(None)
    assert os.path.dirname(folder) == str(tmp_path) and os.path.isdir(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"Cannot write logs to .*/file \(File exists"):
        made_log_dir(f"{tmp_path}/file")


def test_another_machines_failure_starts_anew_and_is_not_blamed_on_this_one(launched):
    code, (out, err) = launched(
        RANK + f"print(rank); raise SystemExit({ANOTHER_FAILED})",
        host_rank=1,
        coordinator="node0:1",
        max_restarts=1,
    )
    assert (code, out) == (ANOTHER_FAILED, "1\n1\n")
    assert err.count("Host 1 ended because another host failed.") == 2
    assert "failed first" not in err


def test_pauses_double(launched, monkeypatch):
    asked = []

    class Events(queue.SimpleQueue):
        def get(self, block=True, timeout=None):
            if timeout and timeout >= 1 and not timeout % 1:
                asked.append(timeout)
                raise queue.Empty
            return super().get(block, timeout)

    monkeypatch.setattr(supervisor.queue, "SimpleQueue", Events)
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 60)
    launched("raise SystemExit(5)", hosts=1, max_restarts=8)
    assert asked == [1, 2, 4, 8, 16, 32, 60, 60]


# Signals.

ASKED = """
import os, signal, sys
signals = {signal.SIGTERM, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
os.write(1, b"ready\\n")
first = signal.sigwait(signals)
os.write(1, b"first %d\\n" % first)
second = signal.sigwait(signals)
os.write(1, b"second %d\\n" % second)
sys.exit(128 + second)
"""


def wait_for_line(log, line):
    """Waits for a line in another host's file."""
    follow = ["timeout", str(HANG_S), "tail", "-n", "+1", "-F", log]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(follow, start_new_session=True, **options) as tail:
        assert f"{line}\n" in tail.stdout
        os.killpg(tail.pid, signal.SIGKILL)


@pytest.fixture
def by_nohup():
    """Has this process ignore SIGHUP, as if somebody had run the tests by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def test_signals_are_passed_on_each_time(tmp_path, by_nohup):
    command = "--hosts=2", f"--log_dir={tmp_path}", "--max_restarts=3", "--"
    with launch(*command, sys.executable, "-SE", "-c", ASKED) as process:
        assert process.stdout.readline() == "ready\n"
        wait_for_line(tmp_path / "host1.log", "ready")
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "first 2\n"
        wait_for_line(tmp_path / "host1.log", "first 2")
        # A terminal that goes away is a reason to end.
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "second 15\n"
        _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 143, (err, (tmp_path / "host1.log").read_text())
    assert "start again" not in err and "failed" not in err


def test_by_nohup_a_terminal_that_goes_away_ends_nobody():
    command = "--hosts=1", "--", sys.executable, "-SE", "-c", ASKED
    with launch(*command, hangup=signal.SIG_IGN) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        for said in ("first 2", "second 2"):
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == f"{said}\n"
        process.communicate(timeout=HANG_S)
    assert process.returncode == 130


ASKS_WHILE_ONE_IS_STOPPED = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
if os.environ["TOWERS_HOST_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    children = f"/proc/{os.getppid()}/task/{os.getppid()}/children"
    while True:
        pids = open(children).read().split()
        if any(") T " in open(f"/proc/{pid}/stat").read() for pid in pids): break
    os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""


def test_a_host_that_was_stopped_hears_that_it_is_to_end(tmp_path):
    code = ASKS_WHILE_ONE_IS_STOPPED
    command = "--hosts=2", f"--log_dir={tmp_path}", "--", sys.executable, "-SE", "-c"
    exit_code, _, _ = run(*command, code)
    assert exit_code == 143


@pytest.mark.skipif(sys.platform != "linux", reason="needs numbers of threads")
def test_a_signal_that_another_thread_gets_is_heard(tmp_path):
    """The kernel may choose any thread, and the main one waits meanwhile."""
    command = "--hosts=1", "--", sys.executable, "-SE", "-c", ASKED
    with launch(*command) as process:
        assert process.stdout.readline() == "ready\n"
        threads = {*map(int, os.listdir(f"/proc/{process.pid}/task"))} - {process.pid}
        for said in ("first 2", "second 2"):
            # To a thread's number: to its process, but by way of this thread.
            os.kill(max(threads), signal.SIGINT)
            assert process.stdout.readline() == f"{said}\n"
        process.communicate(timeout=HANG_S)
    assert process.returncode == 130


def test_a_launcher_that_is_killed_takes_all_with_it(tmp_path):
    """Whatever holds a host's output would keep it open."""
    child = [sys.executable, "-SE", "-c", FOREVER]
    code = (
        f"import subprocess; subprocess.Popen({child}, start_new_session=True); "
        f"print('ready', flush=True); {FOREVER}"
    )
    command = "--hosts=2", f"--log_dir={tmp_path}", "--"
    with launch(*command, sys.executable, "-SE", "-c", code) as process:
        assert process.stdout.readline() == "ready\n"
        wait_for_line(tmp_path / "host1.log", "ready")
        started = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        assert len(started.split()) == 3  # two hosts and what watches
        process.kill()
        out, _ = process.communicate(timeout=HANG_S)
    assert (process.returncode, out) == (-signal.SIGKILL, "")


def test_a_terminal_stays_one_for_the_first_host(tmp_path):
    master, end = pty.openpty()
    code = "import sys; print(sys.stdout.isatty(), sys.stderr.isatty())"
    command = "--hosts=2", f"--log_dir={tmp_path}", "--", sys.executable, "-c", code
    with launch(*command, stdin=end, stdout=end, stderr=end) as process:
        os.close(end)
        text = read_all(master)
    assert process.returncode == 0
    assert "True True" in text
    assert (tmp_path / "host1.log").read_text() == "False False\n"


# The command line.


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--", "my.py", "--a=1"], [sys.executable, "my.py", "--a=1"]),
        (["my.py", "--hosts=9"], [sys.executable, "my.py", "--hosts=9"]),
        (["--", "-m", "my.module", "x"], [sys.executable, "-m", "my.module", "x"]),
        (["--", "bash", "-c", "x"], ["bash", "-c", "x"]),
        (["bash", "--", "x"], ["bash", "--", "x"]),
    ],
)
def test_a_command(words, command):
    options = read("--hosts=4 --num_gpus 1 --max_restarts=3", *words)
    assert options.command == tuple(command)
    assert (options.least, options.most, options.num_gpus) == (4, 4, 1)
    assert (options.max_restarts, options.log_dir) == (3, None)


@pytest.mark.parametrize("words", [["--model_dir=d/e"], ["-x", "--model_dir", "d/e"]])
def test_logs_are_in_the_model_dir(words):
    assert read("--hosts=2", "--", "my.py", *words).log_dir == "d/e"
    assert read("--hosts=2 --log_dir=f", "--", "my.py", *words).log_dir == "f"


WRONG = {
    "": "Received --hosts=; expected a number, such as --hosts=2, or with --launcher=",
    "--hosts=0": "Received --hosts=0; expected",
    "--hosts=99999": "Received 99,999 hosts by --hosts, all of them on this machine",
    "--hosts=1:2": "Received --hosts=1:2; a range is for --launcher=ray only; expected",
    "--hosts=1:2 --host_rank=0 --coordinator=a:1": "a range is for --launcher=ray only",
    "--hosts=3:2": "Received --hosts=3:2; expected",
    "--hosts=x": "Received --hosts=x; expected",
    "--hosts=2 --num_gpus=0": "Received --num_gpus=0; expected at least 1.",
    "--hosts=2 --num_gpus=x": "Received --num_gpus=x; expected a whole number",
    "--hosts=2 --max_restarts=-1": "Received --max_restarts=-1; expected at least 0.",
    "--hosts=2 --fail_seconds=0": "Received --fail_seconds=0.0; expected more than",
    "--hosts=2 --join_seconds=nan": "Received --join_seconds=nan; expected more",
    "--hosts=2 --host_rank=2": "Received --host_rank=2 for 2 hosts; expected 0 to 1.",
    "--hosts=2 --host_rank=x": "Received --host_rank=x; expected a whole number, "
    "or auto; see --help.",
    "--hosts=2 --host_rank=1": "Received --coordinator=; expected where",
    "--hosts=2 --coordinator=a:1": "Received --coordinator without --host_rank",
    "--hosts=2 --interface=lo": "Received --interface without --host_rank",
    "--hosts=1:2 --host_file=x": "Received --host_file=x; --host_file is gone, with",
    "--hosts=2 --host_file x": "Received --host_file; --host_file is gone, with the",
    "--hosts=2 --launcher=mpi": "Received --launcher=mpi; expected one of local, "
    "ray; see --help.",
    "--hosts=2 --num_cpus=2": "Received --num_cpus=2 without --launcher=ray; expected",
    "--hosts=2 --launcher=ray --host_rank=0": "Received --host_rank with --laun",
    "--hosts=2 --launcher=ray --log_dir=x": "Received --log_dir with --launcher=ray",
    "--hosts=2 --launcher=ray --placement_strategy=x": "expected one of PACK, "
    "SPREAD, STRICT",
    "--hosts=2 --launcher=ray --num_cpus=0": "Received --num_cpus=0; expected at least",
    "--hosts=2 --model=cnn": "Received --model before --; expected flags of towers",
    "--hsots=2": "Received --hsots, but there is no such flag (did you mean --hosts?)",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_flags_are_one_sentence(words):
    with pytest.raises(ValueError) as caught:
        read(words)
    assert WRONG[words] in str(caught.value)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_ray_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"not installed; run: pip install 'ray"):
        read("--hosts=2 --launcher=ray -- my.py")


def test_arguments_for_ray(monkeypatch):
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: name)
    options = read("--hosts=2:4 --launcher=ray --num_cpus=3", "--", "my.py")
    assert (options.launcher, options.num_cpus) == ("ray", 3)
    assert (options.least, options.most, options.placement_strategy) == (2, 4, "PACK")


@pytest.mark.parametrize(
    ("words", "restarts"),
    [
        ("--hosts=2", 0),
        ("--hosts=2:2", 0),
        ("--hosts=2 --launcher=ray", 0),
        ("--hosts=1:2 --launcher=ray", 3),
        ("--hosts=1:2 --launcher=ray --max_restarts=0", 0),
    ],
)
def test_a_range_of_hosts_restarts_by_default(monkeypatch, words, restarts):
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: name)
    assert read(words, "my.py").max_restarts == restarts


def test_no_token_for_several_machines():
    asked = arguments.LaunchOptions(2, 2, ("x",), host_rank=0, coordinator="a:1")
    with pytest.raises(
        ValueError, match=r"Received no TOWERS_TOKEN; expected the same"
    ):
        Machine(asked, {})


def test_a_command_that_cannot_be_started(launched):
    with pytest.raises(ValueError, match=r"Cannot start /no/such \(No such file"):
        asked = arguments.LaunchOptions(1, 1, ("/no/such",))
        supervisor.Supervisor(asked, Machine(asked, {})).run()


def run(*words, **options):
    with launch(*words, **options) as process:
        out, err = process.communicate(timeout=HANG_S)
    return process.returncode, out, err


def test_flags_of_towers_train_are_checked_once():
    code, out, err = run("--hosts=2", "--", "--model=cnn", "--modle_dir=x")
    assert (code, out) == (1, "")
    assert err == (
        "towers.launch: Received --modle_dir, but there is no such flag (did you mean "
        "--model_dir?); see --help.\n"
    )


TRAIN = """
import json, sys
from towers.launch import arguments
for words in json.loads(sys.argv[1]):
    try:
        found = arguments.read(words, "")
        print(*found.command[1:], found.num_gpus, found.log_dir)
    except ValueError as error:
        print(error)
assert "tensorflow" not in sys.modules
"""


def test_flags_of_towers_train(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def build(input_shape, num_outputs): pass")
    folder, model = f"--model_dir={tmp_path}", f"--model={mine}"
    asked = [
        ["--hosts=2", "--num_gpus=2", "--", folder],
        ["--hosts=2", "--", folder, "--num_gpus=3"],
        ["--hosts=2", "--num_gpus=2", "--", model, folder, "--num_gpus=3"],
        ["--hosts=2", "--", "--gpu_indices=0,1"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(asked)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=HANG_S,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"-m towers.train {folder} --num_gpus=2 2 {tmp_path}",
        f"-m towers.train {folder} --num_gpus=3 3 {tmp_path}",
        "Received --num_gpus=2 before -- and --num_gpus=3 after it; expected one of "
        "them, which is for each host.",
        "Received --gpu_indices=0,1 for hosts on one machine; expected "
        "CUDA_VISIBLE_DEVICES with the GPUs that they divide.",
    ]


def test_strays_are_those_with_the_mark():
    strays, others = Strays(), Strays()
    environ = os.environ | strays.mark
    with subprocess.Popen([sys.executable, "-SE", "-c", FOREVER], env=environ) as one:
        assert [each.pid for each in strays.processes()] == [one.pid]
        assert not others.processes()
        strays.signal(signal.SIGKILL)
    assert not strays.processes()
