"""Hosts that come and go: what the launcher starts, and when it ends."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading

import psutil
import pytest

from tests.limits import HANG_S
from tests.towers.launch.launching import ROOT, launch
from tests.variants import slow
from towers.cluster import addresses
from towers.cluster.elastic import Over
from towers.launch import arguments
from towers.launch.elastic import Launcher, course, host_file, hosts, launcher, slot
from towers.launch.elastic.ssh import __main__ as there
from towers.launch.elastic.ssh import machines as listed
from towers.launch.machine import Machine
from towers.program.ending import ANOTHER_FAILED

pytestmark = pytest.mark.quick_one_in(2)

SLOT = "import os, sys; slot = os.environ['TOWERS_SLOT']\n"
PAUSE = "import signal; signal.pause()"


def until(holds):
    """Waits until something holds, and returns it."""
    for _ in range(100 * HANG_S):
        if found := holds():
            return found
        threading.Event().wait(0.01)
    raise AssertionError("it never holds")


class Run:
    """Launchers whose hosts count together, and what these have said."""

    def __init__(self, folder):
        self.folder, self._opened = folder, contextlib.ExitStack()
        self._seen, self.launchers, self.said = 0, [], []

    def launch(self, *words, goal="", **environ):
        host = "-m", "tests.towers.launch.elastic_host", str(self.folder), str(goal)
        process = self._opened.enter_context(
            launch(
                *(*words, "--", *host),
                environ={"PYTHONUNBUFFERED": "1", **environ},
                cwd=ROOT,
            )
        )
        self.launchers.append(process)
        reader = threading.Thread(target=self.said.extend, args=[process.stderr])
        reader.start()
        self._opened.callback(reader.join)
        # Only where a test has failed does it run still.
        self._opened.callback(process.kill)
        return process

    def start(self, hosts="1:3", *words, **options):
        words = f"--hosts={hosts}", f"--log_dir={self.folder}", *words
        return self.launch(*words, **options)

    def lines(self):
        """What hosts have said since `begin` last returned."""
        file = self.folder / "said"
        text = file.read_text() if file.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        return [json.loads(line) for line in whole][self._seen :]

    def begin(self, *slots):
        """Waits until a generation of these has begun; returns who they are."""
        return self._begin(len(slots), lambda mine: {*mine} == {*slots})

    def begin_any(self, count):
        """Waits until a generation of any so many has begun; returns who they are."""
        return self._begin(count, lambda mine: len(mine) == count)

    def _begin(self, count, are_all):
        def found():
            every = {}
            for position, line in enumerate(self.lines(), 1):
                if "place" in line and line["place"][1] == count:
                    mine = every.setdefault(line["steps"], {})
                    mine[line["slot"]] = line
                    if are_all(mine):
                        return position, mine
            return None

        seen, mine = until(found)
        self._seen += seen
        return mine

    def says(self, pattern):
        return until(lambda: re.search(pattern, "".join(self.said)))

    def end(self, process=None):
        """Waits for a launcher; returns its exit code."""
        process = process or self.launchers[-1]
        return process.wait(timeout=HANG_S)

    def stop(self, process=None):
        (process or self.launchers[-1]).send_signal(signal.SIGTERM)
        assert self.end(process) == 143, self.said

    def close(self):
        self._opened.close()


@pytest.fixture
def run(tmp_path):
    one = Run(tmp_path)
    yield one
    one.close()


def kill(*victims, number=signal.SIGKILL):
    for each in victims:
        os.kill(each["pid"], number)


def pids(begun):
    return {number: each["pid"] for number, each in begun.items()}


# One fails.


@pytest.mark.parametrize("victim", [2, slow(0)])
def test_one_is_killed_and_another_one_takes_its_place(run, victim):
    run.start()
    before = run.begin(0, 1, 2)
    assert not any(each["restarted"] for each in before.values())
    kill(before[victim])
    rest = run.begin(*({0, 1, 2} - {victim}))
    assert pids(rest).items() <= pids(before).items()
    assert all(each["steps"] > 0 for each in rest.values())
    after = run.begin(0, 1, 2)
    assert pids(rest).items() <= pids(after).items()
    assert {k for k, each in after.items() if each["restarted"]} == {victim}
    log = rf" \(see {run.folder}/host{victim}\.log\)" if victim else ""
    run.says(rf"Host {victim} \(pid \d+\) failed: SIGKILL{log}; it starts again in 1 s")
    run.says(r"2 hosts go on, as host \d \(\S+, pid \d+\) has ended\.")
    run.says(r"3 hosts go on, as host 2 \(\S+, pid \d+\) arrives\.")
    run.stop()


@pytest.mark.slow
def test_all_are_killed(run):
    run.start("2:3", "--max_restarts=1")
    before = run.begin(0, 1, 2)
    # First they stand still: else the last ones may go on before they are killed.
    kill(*before.values(), number=signal.SIGSTOP)
    kill(*before.values())
    after = run.begin(0, 1, 2)
    assert not {*pids(after).values()} & {*pids(before).values()}
    assert all(each["restarted"] for each in after.values())
    # That was the only restart.
    kill(after[1])
    assert run.end() == 137
    run.says(r"after 1 restart of 1 \(--max_restarts\)\.")


@pytest.mark.slow
def test_one_that_keeps_failing_is_left_out(run):
    (run.folder / "fails-1").write_text("9")
    run.start()
    # The first generation does not wait for it.
    run.begin(0, 2)
    starts = [each for each in _starts(run) if each["slot"] == 1]
    assert len(starts) == 3 and not any(each["restarted"] for each in starts)
    run.says(
        r"failed: exit code 9 \(see \S+\), 3 times running; it is left out, and 2 "
        "hosts may go on"
    )
    run.stop()


def _starts(run):
    lines = map(json.loads, (run.folder / "said").read_text().splitlines())
    return [each for each in lines if "starts" in each]


@pytest.mark.slow
def test_too_few_remain(run):
    run.start("2:2", "--join_seconds=5")
    before = run.begin(0, 1)
    (run.folder / "fails-1").write_text("9")
    kill(before[1])
    assert run.end() == 137
    run.says(r"1 host is ready \(.*\) after 5 s; expected 2 at least\.")


@pytest.mark.slow
def test_one_that_stands_still_is_ended(run):
    """Its connection is silent, which takes a while to notice."""
    run.start("1:2", "--fail_seconds=1")
    before = run.begin(0, 1)
    kill(before[1], number=signal.SIGSTOP)
    run.begin(0)
    after = run.begin(0, 1)
    assert after[1]["pid"] != before[1]["pid"]
    run.stop()


# Others are wanted.


@pytest.mark.slow
def test_a_file_says_how_many_are_wanted(run):
    file = run.folder / "hosts"
    file.write_text("1\n")
    run.start("1:3", f"--host_file={file}")
    first = run.begin(0)
    _replace(file, "3")
    more = run.begin(0, 1, 2)
    assert more[0]["pid"] == first[0]["pid"]
    assert more[1]["restarted"] and more[2]["restarted"]
    _replace(file, "4")
    run.says(r"Received '4' in \S+; expected the number of hosts, from 1 to 3\.")
    _replace(file, "2")
    # The last ones leave: one that has joined since the first.
    assert 0 in run.begin_any(2)
    run.says(r"Host [12] \(pid \d+\) has left\.")
    _replace(file, "3")
    run.begin(0, 1, 2)
    run.stop()


def _replace(file, text):
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


# Machines that ssh reaches.

SSH = """#!/bin/sh
# As ssh does, but on this machine: ssh MACHINE COMMAND.
test -e "$FOLDER/down-$1" && exit 255
echo $1 >> "$FOLDER/reached"
exec sh -c "$2"
"""


@pytest.fixture
def by_ssh(run):
    script = run.folder / "ssh"
    script.write_text(SSH)
    script.chmod(0o755)
    (run.folder / "hosts").write_text("127.0.0.1\n127.0.0.2\n")
    environ = {"TOWERS_SSH": str(script), "FOLDER": str(run.folder)}
    return run, lambda: run.start("1:3", f"--host_file={run.folder}/hosts", **environ)


def test_machines_of_a_list(by_ssh):
    run, start = by_ssh
    start()
    before = run.begin(0, 1)
    kill(before[1])
    run.says(r"Host 1 \(pid \d+\) failed: exit code 137 on 127\.0\.0\.2")
    after = run.begin(0, 1)
    assert after[0]["pid"] == before[0]["pid"] and after[1]["pid"] != before[1]["pid"]
    _replace(run.folder / "hosts", "127.0.0.2\n127.0.0.3\n")
    # The first one leaves, and another machine has one.
    moved = run.begin(1, 2)
    assert moved[1]["pid"] == after[1]["pid"]
    reached = (run.folder / "reached").read_text().split()
    assert sorted(reached[:2]) == ["127.0.0.1", "127.0.0.2"]
    assert reached[2:] == ["127.0.0.2", "127.0.0.3"]
    run.stop()


@pytest.mark.slow
def test_a_file_that_changes_again_while_a_host_ends(by_ssh):
    run, start = by_ssh
    start()
    run.begin(0, 1)
    for text in ("127.0.0.3\n127.0.0.2\n", "127.0.0.2\n"):
        _replace(run.folder / "hosts", text)
        run.says("its machine is no longer wanted|1 host goes on")
    run.begin_any(1)
    _replace(run.folder / "hosts", "127.0.0.2\n127.0.0.4\n")
    run.begin(0, 1)
    run.stop()


def test_other_machines_have_places_of_their_own(by_ssh, monkeypatch):
    run, _ = by_ssh
    asked = arguments.LaunchOptions(1, 4, ("x",), elastic=True, log_dir=str(run.folder))
    monkeypatch.setenv("TOWERS_SSH", "true")
    one = listed.Machines(asked, ["127.0.0.1", "127.0.0.2", "127.0.0.3"])
    slots = [slot.ProcessSlot(number) for number in range(4)]
    for each in slots[:3]:
        each.begin("a process")
        one._machine_for(each.number)
    assert one.want(["d", "127.0.0.2", "127.0.0.3"], slots) == {0}
    # It is still there: nobody acts on what is wanted while the run ends.
    assert one.want(["127.0.0.2", "e"], slots) == {0, 2}
    assert one.want(["127.0.0.2"], slots) == {0, 2}


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (255, 1)])
def test_a_host_has_no_input_and_its_own_exit_code(
    tmp_path, monkeypatch, code, expected
):
    monkeypatch.chdir(tmp_path)  # where it goes itself, and others are not to stay
    asked = {"number": 0, "folder": str(tmp_path), "environ": {}}
    asked["command"] = ["sh", "-c", f"cat; exit {code}"]
    read, write = os.pipe()
    os.write(write, f"{json.dumps(asked)}\n".encode())
    with open(read) as lines:
        assert there.main(lines) == expected
        os.close(write)


@pytest.mark.parametrize("command", ["", "ssh 'x", "/no/such -x"])
def test_no_ssh(command, monkeypatch, tmp_path):
    monkeypatch.setenv("TOWERS_SSH", command)
    asked = arguments.LaunchOptions(1, 2, ("x",), elastic=True, log_dir=str(tmp_path))
    with pytest.raises(ValueError, match="another by TOWERS_SSH"):
        listed.Machines(asked, ["127.0.0.1"])


def test_machines_reach_the_launcher_where_others_do(monkeypatch):
    routes = {"here": "127.0.0.1", "node2": "10.0.0.1", "gone": None}
    monkeypatch.setattr(listed, "_route_to", routes.get)
    asked = arguments.LaunchOptions(1, 2, ("x",), elastic=True)
    found = listed._address_for(asked, ["here", "me@gone", "me@node2"])
    assert found == "10.0.0.1"
    assert listed._address_for(asked, ["here"]) == "127.0.0.1"
    with pytest.raises(ValueError, match="Received gone in --host_file, which is not"):
        listed._address_for(asked, ["gone"])


@pytest.mark.slow
def test_a_machine_that_is_not_reached_is_tried_again(by_ssh):
    run, start = by_ssh
    down = run.folder / "down-127.0.0.2"
    down.touch()
    start()
    said = r"Host 1 \(pid \d+\) failed: ssh has lost 127\.0\.0\.2, or does not reach it"
    run.says(said)
    down.unlink()
    run.begin(0, 1)
    run.stop()


def test_hosts_on_other_machines_end_with_their_launcher(by_ssh):
    run, start = by_ssh
    process = start()
    pids = [each["pid"] for each in run.begin(0, 1).values()]
    process.kill()
    until(lambda: not any(map(psutil.pid_exists, pids)))


# Signals.


def test_one_that_is_asked_to_end_leaves_the_others(run):
    run.start()
    before = run.begin(0, 1, 2)
    kill(before[1], number=signal.SIGTERM)
    rest = run.begin(0, 2)
    assert pids(rest) == {k: before[k]["pid"] for k in (0, 2)}
    run.says(r"Host 1 \(pid \d+\) was stopped: exit code 143; it does not start again")
    kill(before[2], number=signal.SIGTERM)
    run.begin(0)
    kill(before[0], number=signal.SIGTERM)
    assert run.end() == 143
    assert len(_starts(run)) == 3


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), slow(signal.SIGINT, 130)]
)
def test_the_launcher_is_asked_to_end(run, number, code):
    process = run.start()
    before = run.begin(0, 1, 2)
    # Also one that is about to start again.
    kill(before[1])
    run.says("starts again in 1 s")
    process.send_signal(number)
    assert run.end() == code
    assert len(_starts(run)) == 3
    assert "waiting" not in "".join(run.said)


# The end.


def test_a_run_that_is_done(run):
    run.start(goal=500)
    assert run.end() == 0
    assert "failed" not in "".join(run.said)


@pytest.mark.slow
def test_the_first_that_is_done_ends_the_run(run):
    """The others do not reach the goal."""
    run.start()
    run.begin(0, 1, 2)
    (run.folder / "done").touch()
    assert run.end() == 0
    assert len(_starts(run)) == 3


# Several machines.


@pytest.fixture
def machines(run):
    with addresses.held_port("127.0.0.1") as free:
        at = addresses.joined(*free.getsockname())

    def start(rank, hosts="1:2", *words, **options):
        words = f"--hosts={hosts}", f"--host_rank={rank}", f"--coordinator={at}", *words
        return run.launch(*words, TOWERS_TOKEN="a secret of all hosts", **options)

    return start


@pytest.mark.slow
def test_a_launcher_on_each_machine(run, machines):
    first, second = machines(0), machines(1)
    before = run.begin(0, 1)
    kill(before[1])
    run.begin(0)
    after = run.begin(0, 1)
    assert after[0]["pid"] == before[0]["pid"] and not after[0]["restarted"]
    assert after[1]["pid"] != before[1]["pid"] and after[1]["restarted"]
    run.stop(second)
    run.begin(0)
    run.stop(first)


def test_launchers_that_a_scheduler_has_numbered(run, machines):
    job = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": str(os.getpid())}
    first = machines("auto", **job, SLURM_PROCID="0")
    second = machines("auto", JOB_COMPLETION_INDEX="1")
    run.says(r"This is host 0, by SLURM_PROCID; the first one waits at 127\.0\.0\.1:")
    run.says("This is host 1, by JOB_COMPLETION_INDEX; the first one waits at")
    run.begin(0, 1)
    run.stop(second)
    run.begin(0)
    run.stop(first)


def test_the_coordinators_machine_may_have_no_host(run, machines):
    first, second = machines(0), machines(1)
    kill(run.begin(0, 1)[0], number=signal.SIGTERM)
    run.begin(1)
    run.says(r"Host 0 \(pid \d+\) was stopped")
    (run.folder / "done").touch()
    assert [run.end(each) for each in (second, first)] == [0, 0]


@pytest.mark.slow
def test_the_coordinators_launcher_is_killed(run, machines):
    first, second = machines(0), machines(1)
    run.begin(0, 1)
    first.kill()
    assert run.end(second) == ANOTHER_FAILED
    run.says("Nobody listens at 127.0.0.1:.* any more; no host starts again")


# What the launcher does, without hosts that meet.


@pytest.fixture
def launched(tmp_path, capfd, monkeypatch):
    """Launches hosts that run some Python; returns the exit code and what was said."""
    every = []

    def launch(code, hosts=(1, 2), **options):
        command = sys.executable, "-S", "-c", SLOT + code
        asked = arguments.LaunchOptions(
            *(*hosts, command),
            elastic=True,
            **{"log_dir": str(tmp_path), "max_restarts": None, **options},
        )
        machine = Machine(
            asked, {**os.environ, "TOWERS_TOKEN": "a secret of all hosts"}
        )
        every.append(machine)
        return Launcher(asked, machine).run(), capfd.readouterr()

    monkeypatch.setattr(slot, "_LONGEST_PAUSE_S", 0.0)
    yield launch
    for machine in every:
        assert not machine.strays.processes()
        machine.strays.end(0)


def test_each_host_has_its_place(launched, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("TOWERS_INTERFACE", "eth7")
    code, (out, err) = launched(
        "import json\n"
        "found = {k: v for k, v in os.environ.items() if k.startswith('TOWERS_')}\n"
        "print(json.dumps(found), os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    assert code == 0
    (found, gpus), (other, gpus_of_other) = (
        text.rsplit(maxsplit=1) for text in (out, (tmp_path / "host1.log").read_text())
    )
    assert (gpus, gpus_of_other) == ("4,5", "6,7")
    found, other = json.loads(found), json.loads(other)
    for each in (found, other):
        del each["TOWERS_HOST_PROCESS"]
    assert (found.pop("TOWERS_SLOT"), other.pop("TOWERS_SLOT")) == ("0", "1")
    assert found == other and len(found["TOWERS_TOKEN"]) == 32
    assert found["TOWERS_ELASTIC"] == "1" and found["TOWERS_RESTARTED"] == "0"
    assert "TOWERS_INTERFACE" not in found
    assert err == (
        "towers.launch: Starting 2 hosts on this machine, with the GPUs 4+5, 6+7; the "
        f"output of hosts other than the first is in {tmp_path}/host1.log.\n"
    )


def test_one_of_several_machines(launched):
    code, (out, err) = launched(
        "print(slot, os.environ['TOWERS_COORDINATOR'], os.environ['TOWERS_INTERFACE'],"
        " os.environ['TOWERS_TOKEN'])",
        hosts=(2, 4),
        host_rank=3,
        coordinator="node0:8476",
        interface="eth0",
    )
    assert (code, out) == (0, "3 node0:8476 eth0 a secret of all hosts\n")
    assert err == "towers.launch: Starting host 3 of 2 to 4.\n"


def test_all_fail_again_and_again(launched):
    code, (out, err) = launched("print('began'); sys.exit(5)")
    assert (code, out) == (5, "began\n" * 3)
    assert err.count("; it starts again in 0 s.") == 4
    assert err.count(", 3 times running; it is left out, and 1 host may go on.") == 1
    assert err.count("; it does not start again, as others have failed, too.") == 1


def test_as_many_as_have_to_remain_are_not_left_out(launched):
    code, (_, err) = launched("sys.exit(5)", hosts=(2, 2))
    assert code == 5 and "left out" not in err
    # One may have tried more often before the other one had failed three times.
    assert all(err.count(f"Host {k} (pid ") >= 3 for k in (0, 1))
    assert "; it does not start again, as others have failed, too." in err


def test_wrong_usage_is_final(launched):
    code, (out, err) = launched("print('began'); sys.exit(2)")
    assert (code, out) == (2, "began\n")
    assert "starts again in" not in err and "; it does not start again." in err


def test_the_cause_is_the_first_that_is_no_consequence(launched):
    code, _ = launched(
        f"if slot == '0': sys.exit({ANOTHER_FAILED})\n"
        "import signal; os.kill(os.getpid(), signal.SIGABRT)",
    )
    assert code == 134


def test_the_others_are_ended_once_one_is_done(launched, monkeypatch):
    monkeypatch.setattr(slot, "TERM_SECONDS", 0.05)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code, (_, err) = launched(
        f"{deaf}if slot == '1': sys.exit(0)\n{PAUSE}", fail_seconds=0.05
    )
    assert code == 0 and "failed" not in err


def test_what_a_process_has_started_ends_with_it(launched, monkeypatch, tmp_path):
    """The next one finds nothing of it."""
    monkeypatch.setattr("towers.launch.elastic.hosts.LAST_WORDS_S", 0.05)
    child = [sys.executable, "-SE", "-c", PAUSE]
    file = tmp_path / "child"
    code, _ = launched(
        "import subprocess\n"
        f"file = {str(file)!r}\n"
        "if not os.path.exists(file):\n"
        f"  child = subprocess.Popen({child}, start_new_session=True)\n"
        "  print(child.pid, file=open(file, 'w'))\n"
        "  sys.exit(7)\n"
        "stat = '/proc/' + open(file).read().strip() + '/stat'\n"
        "sys.exit(os.path.exists(stat) and ') Z ' not in open(stat).read())",
        hosts=(1, 1),
    )
    assert code == 0


def test_a_coordinator_at_an_interface(launched):
    with addresses.held_port("127.0.0.1") as free:
        port = free.getsockname()[1]
    code, (out, _) = launched(
        "print(os.environ['TOWERS_COORDINATOR'])",
        hosts=(1, 1),
        host_rank=0,
        coordinator=f"no-such-name:{port}",
        interface="127.0.0.1",
    )
    assert (code, out) == (0, f"127.0.0.1:{port}\n")


def test_a_command_that_cannot_be_started():
    asked = arguments.LaunchOptions(1, 1, ("/no/such",), elastic=True)
    with pytest.raises(ValueError, match=r"Cannot start /no/such \(No such file"):
        Launcher(asked, Machine(asked, {})).run()


def test_after_a_signal_no_further_host_starts(tmp_path, monkeypatch):
    command = sys.executable, "-S", "-c", "import time; time.sleep(60)"
    asked = arguments.LaunchOptions(
        *(1, 5, command), elastic=True, log_dir=str(tmp_path), max_restarts=None
    )
    machine = Machine(asked, {**os.environ, "TOWERS_TOKEN": "a secret of all hosts"})
    launcher, start, started = Launcher(asked, machine), machine.start, []

    def signalled(number, *args):
        started.append(number)
        launcher.events.put(signal.SIGTERM)
        return start(number, *args)

    monkeypatch.setattr(machine, "start", signalled)
    assert launcher.run() == 128 + signal.SIGTERM
    assert started == [0]


def test_no_token_for_several_machines():
    asked = arguments.LaunchOptions(
        1, 2, ("x",), host_rank=1, coordinator="a:1", elastic=True
    )
    with pytest.raises(ValueError, match="Received no TOWERS_TOKEN; expected the same"):
        Machine(asked, {})


class Process:
    """A process that is none, and notes its signals."""

    def __init__(self, rank, code=None):
        self.rank, self.exit_code, self.signals = rank, code, []
        self.signal = self.signals.append


def test_whether_anybody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        assert launcher._listens(where)
    assert not launcher._listens(where)
    # Of what cannot be reached, nobody knows.
    assert launcher._listens("no-such.invalid:1")


def test_who_leaves_and_who_starts():
    asked = arguments.LaunchOptions(1, 4, ("x",), elastic=True)
    every = hosts.Hosts(asked, None, None)
    places = every.slots
    for number in (0, 1, 2):
        places[number].begin(Process(number))
    places[3].due_s = 1.0
    processes = [each.host for each in places]
    assert every.staying() == places
    # The coordinator has told 1 to leave, and does not know 2 yet.
    every.end_surplus(2, {0: "trains", 1: "leaves"})
    assert every.staying() == [places[0], places[2]] and places[3].due_s is None
    every.end_surplus(1, {0: "trains", 1: "leaves"})
    assert [each.signals for each in processes[:3]] == [[], [], [signal.SIGTERM]]
    places[2].end(0.0)
    assert every.missing(1) == []
    assert every.missing(3) == [places[2], places[3]] and not places[1].again
    # Where one still runs, another one starts after it.
    places[2].is_out = True
    assert every.missing(4) == [places[3]] and places[1].again
    # What was wanted before does not count.
    assert every.missing(1) == [] and not places[1].again


def test_the_exit_code():
    def code(*failures, **known):
        found = [course.Ended(Process(*of), at_s) for at_s, *of in failures]
        return course.Course(failures=found, **known).code()

    assert code() == ANOTHER_FAILED
    assert code((1, 0, 9), is_done=True) == 0
    assert code((1, 0, ANOTHER_FAILED), (2, 1, 9), (3, 2, 5)) == 9
    # Others have gone on after the first, and the second was not with them.
    began = {"begun_s": 2.0, "members": (0, 2)}
    assert code((1, 0, 9), (3, 1, 5), (4, 2, 7), **began) == 7
    assert code((1, 0, 9), **began) == 9
    assert code((1, 0, 9), stopped=signal.SIGINT, _stopped_s=2.0) == 130
    assert code((3, 0, 143), stopped=signal.SIGINT, _stopped_s=2.0) == 143
    assert code((1, 1, 143), over=Over("", False), **began) == 0
    assert code((3, 0, 139), over=Over("", False), **began) == 139


def test_pauses_double_until_one_trains_well(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(slot.time, "monotonic", lambda: now_s[0])
    one = slot.ProcessSlot(0)
    found = []
    for _ in range(8):
        one.begin("a process")
        one.train()
        now_s[0] += 59.0
        one.end(now_s[0])
        one.failures += 1
        found.append(one.wait())
        assert one.due_s == now_s[0] + found[-1] and one.is_there
    assert found == [1, 2, 4, 8, 16, 32, 60, 60]
    one.begin("a process")
    one.train()
    now_s[0] += 60.0
    one.end(now_s[0])
    assert one.failures == 0 and not one.is_there


@pytest.mark.parametrize(
    "text", ["", "0", "4", "1\n2", "a b", "a\n;b", "-oX", "a\nb\nc\nd"]
)
def test_a_file_with_something_else(tmp_path, text):
    file = tmp_path / "hosts"
    file.write_text(text)
    said = f"Received {text!r} in {file}; expected the number of hosts, or machines, "
    said += "one on each line, from 1 to 3."
    with pytest.raises(ValueError, match=re.escape(said)):
        host_file.HostFile(str(file), 1, 3).read()


def test_a_machine_that_is_listed_twice(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a\nb\na\n")
    with pytest.raises(ValueError, match="Received a twice in "):
        host_file.HostFile(str(file), 1, 3).read()


def test_a_machine_that_is_listed_for_two_users(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a\nme@a\n")
    with pytest.raises(ValueError, match="Received a twice in "):
        host_file.HostFile(str(file), 1, 3).read()


def test_a_file_for_which_nobody_writes(tmp_path):
    os.mkfifo(tmp_path / "hosts")
    with pytest.raises(ValueError, match=r"Cannot read --host_file=\S+ \(not a regul"):
        host_file.HostFile(str(tmp_path / "hosts"), 1, 3).read()


def test_a_file_with_more_hosts_than_a_machine_can_start(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("99999")
    with pytest.raises(ValueError, match="all of them on this machine"):
        host_file.HostFile(str(file), 1, 100_000).read()


def test_a_file_of_machines(tmp_path, capsys):
    file = tmp_path / "hosts"
    file.write_text("# mine\nme@node1\n10.0.0.2  # slow\n\nfe80::1%eth0\n::1\n")
    one = host_file.HostFile(str(file), 1, 4)
    assert one.read() == ["me@node1", "10.0.0.2", "fe80::1%eth0", "::1"]
    _replace(file, "2")
    one.next_s = 0.0
    assert one.changed() is None
    assert (
        "expected machines, one on each line, from 1 to 4." in capsys.readouterr().err
    )


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"Cannot read --host_file=\S+ \(No such file"):
        host_file.HostFile(str(tmp_path / "hosts"), 1, 3).read()


def test_a_file_that_changes(tmp_path, monkeypatch, capsys):
    now_s = [0.0]
    monkeypatch.setattr(host_file.time, "monotonic", lambda: now_s[0])
    file = tmp_path / "hosts"
    file.write_text("1")
    one = host_file.HostFile(str(file), 1, 3)
    assert one.read() == 1

    def changed(text=None):
        if text is not None:
            _replace(file, text)
        now_s[0] += 1.0
        return one.changed()

    _replace(file, "2")
    assert one.changed() is None  # too soon
    assert [changed(), changed(), changed("3")] == [2, None, 3]
    assert [changed(""), changed("2"), changed("x"), changed()] == [None, 2, None, None]
    assert "Received 'x' in" in capsys.readouterr().err
    file.unlink()
    assert [changed(), changed("1")] == [None, 1]
