"""towers.devices.sharing: runs that come, go and die, made up and in real processes."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.towers.devices.sharing.world import World
from towers.devices.sharing import RegistryError, machine, registry, table
from towers.elastic.shares import Shares

PLACES = [f"GPU-{gpu}/{part}" for gpu in "ab" for part in range(4)]
FOUR = ["a", "b", "c", "d"]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def join(run, seconds=0.0):
    return run.join(seconds, say=lambda line: None)


def follow(*runs):
    """Lets runs do what they should, until all do; returns how many each holds."""
    for _ in range(2 * len(runs)):
        for run in runs:
            run.hold(run.look())
    return [len(run.look()) for run in runs]


# The life of runs


def test_one_takes_up_to_its_limit(world):
    assert join(world.run(PLACES, 2, 6)) == tuple(PLACES[:6])
    assert join(world.run(PLACES, 1, 1)) == ("GPU-b/2",)


def test_runs_come_and_go(world):
    first, second, third = (world.run(PLACES, 2, limit) for limit in (8, 8, 3))
    assert join(first) == tuple(PLACES)
    seen = []

    def others():
        seen.append([first.look(), first.look()])
        first.hold(first.look())

    world.while_sleeping = others
    assert join(second, 60) == tuple(PLACES[4:])
    # It was told once, and has moved once.
    assert seen == [[tuple(PLACES[:4])] * 2]
    world.while_sleeping = lambda: follow(first, second)
    assert join(third, 60) == ("GPU-a/3", "GPU-b/3")
    assert follow(first, second, third) == [3, 3, 2]
    second.leave()
    assert first.look() == ("GPU-a/0", "GPU-a/1", "GPU-a/2", "GPU-b/0", "GPU-b/1")
    assert third.look() == ("GPU-a/3", "GPU-b/2", "GPU-b/3")
    third.leave()
    first.leave()
    assert join(second) == tuple(PLACES)


def test_one_grows_only_after_another_has_let_go(world):
    first, second = world.run(FOUR, 1, 4), world.run(FOUR, 1, 4)
    join(first)
    world.while_sleeping = lambda: first.hold(first.look())
    assert join(second, 60) == ("c", "d")
    third = world.run(FOUR, 1, 1)
    world.while_sleeping = lambda: second.hold(second.look())
    assert join(third, 60) == ("d",)
    assert (first.look(), second.look()) == (("a", "b"), ("c",))
    first.leave()
    assert second.look() == ("a", "b", "c")
    # It has not moved yet, but nobody else may have them.
    fourth = world.run(FOUR, 1, 4)
    with pytest.raises(RegistryError, match="expected them to be given up"):
        join(fourth)
    second.hold(["c", "a"])
    assert join(fourth) == ("b",)


def test_a_look_that_is_not_followed_gives_back(world):
    first, second = world.run(FOUR, 1, 2), world.run(FOUR, 1, 4)
    join(first)
    join(second)
    first.leave()
    assert second.look() == tuple(FOUR)
    world.while_sleeping = second.look
    third = world.run(FOUR, 1, 4)
    assert join(third, 60) == ("a", "b")
    assert second.look() == ("c", "d")


def test_a_minimum_is_never_asked_for(world):
    first, second = world.run(FOUR, 3, 4), world.run(FOUR, 1, 4)
    join(first)
    world.while_sleeping = lambda: first.hold(first.look())
    assert join(second, 60) == ("d",)
    assert follow(first, second) == [3, 1]


def test_one_that_waits_holds_nothing(world):
    first, second = world.run(FOUR, 1, 4), world.run(FOUR, 2, 2)
    join(first)
    first.hold(["b", "c", "d"])
    moves = iter([["b", "c", "d"], ["b", "c"]])
    seen = []

    def others():
        first.hold(next(moves))
        seen.append(first.look())

    world.while_sleeping = others
    assert join(second, 60) == ("a", "d")
    assert seen == [("b", "c")] * 2


def test_a_killed_run_leaves_nothing_behind(world):
    first, second = world.run(FOUR, 2, 2), world.run(FOUR, 2, 4)
    join(first)
    join(second)
    world.kill(first)
    assert second.look() == tuple(FOUR)


def test_one_killed_while_it_waits(world):
    first, second = world.run(FOUR, 2, 4), world.run(FOUR, 2, 4)
    join(first)

    def die():
        assert first.look() == ("a", "b")
        world.kill(second)
        second.leave = lambda: None
        raise KeyboardInterrupt

    world.while_sleeping = die
    with pytest.raises(KeyboardInterrupt):
        join(second, 60)
    assert first.look() == tuple(FOUR)


def test_one_stopped_while_it_waits(world):
    first, second = world.run(FOUR, 2, 4), world.run(FOUR, 2, 4)
    join(first)

    def stop():
        raise KeyboardInterrupt

    world.while_sleeping = stop
    with pytest.raises(KeyboardInterrupt):
        join(second, 60)
    assert first.look() == tuple(FOUR)
    second.leave()


# What is said


def test_minimums_that_do_not_fit(world):
    first, second = world.run(FOUR, 2, 4, "/runs/one"), world.run(FOUR, 3, 4)
    join(first)
    with pytest.raises(RegistryError) as raised:
        join(second, 1e9)
    assert str(raised.value) == (
        "Received a minimum of 3 places for this run, with 2 for /runs/one (pid "
        f"{first.pid}) before; expected all together to fit into 4 places, so ask for "
        "less, or wait until a run has ended."
    )
    assert first.look() == tuple(FOUR)


def test_runs_divide_a_gpu_alike(world):
    join(world.run(["a/0 of 2", "a/1 of 2", "b/0 of 1"], 1, 3))
    join(world.run(["b/0 of 1", "c/0 of 4"], 1, 2))
    whole = world.run(["a/0 of 1"], 1, 1)
    said = r"Received --gpu_split=1 for a, .*=2; expected"
    with pytest.raises(RegistryError, match=said):
        join(whole)


def test_waiting_says_for_whom(world):
    first, second = world.run(FOUR, 1, 4, "/runs/one"), world.run(FOUR, 2, 2)
    join(first)
    said = []
    holder = f"/runs/one (pid {first.pid}) has still to give up"
    with pytest.raises(RegistryError) as raised:
        second.join(60, said.append)
    assert said == [f"Waiting for 2 places: {holder} 2 of 4 places."]
    assert str(raised.value) == (
        f"Received no 2 places within 60 s, as {holder} 2 of 4 places; expected them "
        "to be given up, so end one of these runs, or wait longer."
    )
    assert world.time == 60
    # It has gone, and may come again.
    assert first.look() == tuple(FOUR)
    world.while_sleeping = lambda: first.hold(FOUR[:3])
    said.clear()
    with pytest.raises(RegistryError):
        second.join(60, said.append)
    assert said == [f"Waiting for 2 places: {holder} 1 of 3 places."]


def test_short_waits_say_nothing(world):
    first, second = world.run(FOUR, 1, 4), world.run(FOUR, 1, 4)
    join(first)
    world.while_sleeping = lambda: first.hold(first.look())
    said = []
    second.join(60, said.append)
    assert not said


@pytest.mark.parametrize(
    ("places", "minimum", "limit", "error"),
    [
        ([], 1, 1, "as places; expected a list of at least one"),
        ("ab", 1, 1, "as places; expected a list"),
        (["a", "a"], 1, 1, "names a more than once"),
        (["a"], 0, 1, "minimum of 0 places; expected a whole number from 1 to 1"),
        (["a"], 2, 2, "minimum of 2 places; expected a whole number from 1 to 1"),
        (["a", "b"], 2, 1, "limit of 1 places; expected a whole number of at least 2"),
        (["a", "b"], 1, 1.5, "limit of 1.5 places"),
    ],
)
def test_wishes_that_cannot_be(world, places, minimum, limit, error):
    with pytest.raises(ValueError, match=error):
        world.run(places, minimum, limit)


def test_calls_out_of_turn(world):
    first, second = world.run(FOUR, 1, 2), world.run(FOUR, 1, 2)
    with pytest.raises(RegistryError, match=r"Received look\(\) before join"):
        first.look()
    with pytest.raises(RegistryError, match=r"Received hold\(\) before join"):
        first.hold(["a"])
    first.leave()
    join(first)
    join(second)
    with pytest.raises(RegistryError, match="a second time"):
        join(first)
    with pytest.raises(RegistryError, match=r"'c' to hold, which a run \(pid 101\)"):
        first.hold(["a", "c"])
    with pytest.raises(RegistryError, match="'e' to hold; expected one of this run's"):
        first.hold(["e"])
    assert first.look() == ("a", "b")


# Filled places


def test_filled_places_are_left_and_taken_again(world):
    run = world.run(FOUR, 2, 4)
    join(run)
    targets = []
    for filled in ["b", "", "b", "b", "", "b", "", ""]:
        world.filled = {*filled}
        target = run.look()
        run.hold(target)
        targets.append("".join(target))
    # It changes only after the same answer twice.
    assert targets == ["abcd"] * 3 + ["acd"] * 4 + ["abcd"]


def test_filled_places_up_to_the_minimum(world):
    run = world.run(FOUR, 2, 4)
    world.filled = {*"acd"}
    # The first answer counts, as there was nothing before.
    assert join(run) == ("a", "b")
    world.filled = {*"abc"}
    run.look()
    # It moves to a better one.
    assert run.look() == ("a", "d")


def test_whoever_joins_need_not_have_filled_places(world):
    first, second = world.run(FOUR, 1, 4), world.run(FOUR, 1, 4)
    join(first)
    world.filled = {"d"}
    first.look()
    first.hold(first.look())
    world.while_sleeping = lambda: first.hold(first.look())
    assert join(second, 60) == ("c",)


def test_filled_is_asked_about_the_runs(world):
    asked = []

    def filled(places, pids):
        asked.append((places, {*pids}))
        return ()

    first, second = world.run(FOUR, 1, 2), world.run(FOUR, 1, 2)
    join(first)
    second._filled = filled
    join(second)
    assert asked == [(tuple(FOUR), {first.pid, second.pid})]


# The file


def file_of(world) -> Path:
    return Path(world.folder, machine.file_name())


def _torn(**changes):
    ours = {"token": "a", "pid": 1, "started": 0.5, "name": "", "minimum": 1}
    ours |= {"limit": 1, "places": ["a"], **changes}
    return json.dumps({"runs": [ours]}).encode()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"\xff", b'{"runs": 5}', b'{"runs": [5]}'),
        b'{"runs": [{"pid": 1}]}',
        b'{"runs": [{"pid": "1"}]}',
        b"[" * 100_000,
        _torn(pid=-1),
        _torn(places=[["a"]]),
        _torn(held=[1, 2]),
    ],
)
def test_a_torn_file_is_begun_anew(world, capsys, content):
    first, second = world.run(FOUR, 1, 2), world.run(FOUR, 1, 2)
    join(first)
    join(second)
    file_of(world).write_bytes(content)
    assert second.look() == ("c", "d")
    assert first.look() == ("a", "b")
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"towers: Warning: {file_of(world)} cannot be understood (")


@pytest.mark.parametrize("lost", ["file", "folder"])
def test_a_lost_file_is_begun_anew(world, lost):
    first, second = world.run(FOUR, 1, 2), world.run(FOUR, 1, 2)
    join(first)
    join(second)
    for file in Path(world.folder).iterdir():
        file.unlink()
    if lost == "folder":
        os.rmdir(world.folder)
    assert second.look() == ("c", "d")
    assert first.look() == ("a", "b")


def test_who_has_come_since_a_file_was_torn_keeps_its_places(world):
    first, second = world.run(FOUR, 2, 4), world.run(FOUR, 2, 2)
    join(first)
    file_of(world).write_text("torn")
    assert join(second) == ("a", "b")
    assert first.look() == ("c", "d")
    first.hold(["c", "d"])
    assert follow(first, second) == [2, 2]
    # Where that leaves too few, the run stays as it is until there are more.
    third = world.run(FOUR, 3, 3)
    file_of(world).write_text("torn")
    assert join(third) == ("a", "b", "c")
    assert first.look() == ("c", "d")
    first.hold(["c", "d"])
    third.leave()
    assert first.look() == ("a", "b", "c", "d")


def test_a_file_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    run = registry.Registry(FOUR, 1, 1, str(tmp_path / "file"))
    with pytest.raises(RegistryError, match="as the file in which runs meet, which"):
        join(run)


@pytest.mark.parametrize("ending", ["", ".lock"])
def test_a_pipe_in_the_place_of_a_file_is_a_sentence(world, ending):
    run = world.run(FOUR, 1, 4)
    join(run)
    path = Path(f"{file_of(world)}{ending}")
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if ending:
        with pytest.raises(RegistryError, match="it is no regular file"):
            run.look()
    else:
        assert run.look() == tuple(FOUR)


def test_a_lock_that_somebody_keeps_is_not_waited_for_without_end(
    world, monkeypatch, capsys
):
    monkeypatch.setattr(table, "_LOCK_S", 0.1)
    run = world.run(FOUR, 1, 4)
    join(run)
    with open(f"{file_of(world)}.lock", "a") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        for act in (run.look, lambda: run.hold(FOUR), run.leave):
            with pytest.raises(
                RegistryError, match="another process has held the lock"
            ):
                act()
        # The run ends nevertheless.
        about = Shares.__new__(Shares)
        about._registry = run
        about.leave()
    assert "Others see this run until its process has ended" in capsys.readouterr().err
    assert run.look() == tuple(FOUR)


def test_the_usual_folder(monkeypatch, tmp_path):
    assert machine.usual_folder({"TOWERS_REGISTRY": "/elsewhere"}) == "/elsewhere"
    monkeypatch.setattr(machine, "_MEMORY", str(tmp_path))
    folder = tmp_path / f"towers-{os.getuid()}"
    assert machine.usual_folder({}) == machine.usual_folder({}) == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    # Somebody else may have been faster.
    folder.symlink_to(tmp_path)
    with pytest.raises(RegistryError, match="belongs to somebody else"):
        machine.usual_folder({})
    folder.unlink()
    folder.touch()
    with pytest.raises(RegistryError, match="cannot be made"):
        machine.usual_folder({})


def test_without_dev_shm(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_MEMORY", str(tmp_path / "none"))
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(tmp_path))
    assert machine.usual_folder({}) == str(tmp_path / f"towers-{os.getuid()}")


# Anything in any order


class Player:
    """A run that checks that what it uses is nobody else's.

    Attributes:
        used: The places that it uses.
        named: Those that the last look has named, if it may still go there.
    """

    def __init__(self, run):
        self.run, self.used, self.named = run, set(), None


class Play:
    """Runs do anything at any time, also while others wait."""

    def __init__(self, world, seed):
        self.world, self.rng = world, random.Random(seed)
        # In the others each run lists some of the places.
        self.same_places = seed % 2 == 0
        self.players, self.waiting, self.done = [], 0, 0
        world.while_sleeping = self.meanwhile

    def one(self):
        self.done += 1
        if not self.players or (self.rng.random() < 0.1 and self.waiting < 3):
            self.start()
            return self.check()
        player = self.rng.choice(self.players)
        action = self.rng.choice([self.look] * 6 + [self.move] * 6 + [self.fill])
        if self.rng.random() < 0.06:
            action = self.rng.choice([self.leave, self.kill])
        action(player)
        return self.check()

    def meanwhile(self):
        for _ in range(self.rng.randint(1, 6)):
            self.one()
        if self.rng.random() < 0.02:
            raise KeyboardInterrupt

    def start(self):
        minimum = self.rng.randint(1, 3)
        limit = self.rng.randint(minimum, 9)
        count = 8 if self.same_places else self.rng.randint(3, 8)
        places = sorted(self.rng.sample(PLACES, count))
        player = Player(self.world.run(places, minimum, limit))
        self.waiting += 1
        try:
            player.used = {*join(player.run, self.rng.choice([0, 3, 30]))}
            self.players.append(player)
        except (RegistryError, KeyboardInterrupt):
            self.world.kill(player.run)  # the process ends
        finally:
            self.waiting -= 1

    def look(self, player):
        player.named = {*player.run.look()}

    def move(self, player):
        if player.named is not None:
            # Also in another order than that of the look.
            player.run.hold(self.rng.sample(sorted(player.named), len(player.named)))
            player.used, player.named = player.named, None

    def leave(self, player):
        player.run.leave()
        self.world.kill(player.run)
        self.players.remove(player)

    def kill(self, player):
        self.world.kill(player.run)
        self.players.remove(player)

    def fill(self, player):
        self.world.filled ^= {self.rng.choice(PLACES)}

    def check(self):
        every = [player.used | (player.named or set()) for player in self.players]
        assert sum(map(len, every)) == len(set().union(*every))
        for player in self.players:
            for places in (player.used, player.named):
                if places is not None:
                    assert player.run._minimum <= len(places) <= player.run._limit


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_two_runs_use_a_place(world, seed):
    play = Play(world, seed)
    while play.done < 1500:
        play.one()
    # In order of arrival: one that waited may have been passed.
    runs = [player.run for player in play.players]
    runs.sort(key=lambda run: world.alive[run.pid])
    world.filled.clear()
    found = follow(*runs) and follow(*runs)
    if play.same_places:
        wishes = [(run._minimum, run._limit) for run in runs]
        assert found == fair(wishes, len(PLACES))


def fair(wishes, count):
    """Pours water into glasses that stand on their minimums."""
    for level in range(count, -1, -1):
        found = [min(limit, max(minimum, level)) for minimum, limit in wishes]
        if sum(found) <= count:
            break
    rest = count - sum(found)
    for index, (_, limit) in enumerate(wishes):
        if rest and found[index] == level < limit:
            found[index] += 1
            rest -= 1
    return found


# Real processes


class Process:
    """A run in a process of its own; see player.py."""

    def __init__(self, folder, places, minimum, limit):
        player = Path(__file__).with_name("player.py")
        flags = map(str, (folder, ",".join(places), minimum, limit))
        self.process = subprocess.Popen(
            [sys.executable, str(player), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, *words):
        print(*words, file=self.process.stdin, flush=True)

    def end(self):
        return json.loads(self.process.stdout.readline())

    def do(self, *words):
        self.begin(*words)
        return self.end()


@pytest.fixture
def start(tmp_path):
    started = []

    def start(minimum, limit, places=FOUR):
        started.append(Process(tmp_path, places, minimum, limit))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def until(expected, ask):
    while ask() != expected:
        pass  # pytest-timeout ends it


def test_processes_share_until_one_is_killed(start):
    first, second = start(1, 4), start(2, 4)
    assert first.do("join") == FOUR
    second.begin("join")
    until(["a", "b"], lambda: first.do("look"))
    first.do("hold", "a", "b")
    assert second.end() == ["c", "d"]
    assert second.do("look") == ["c", "d"]
    assert "'a' to hold, which player (pid " in second.do("hold", "a")
    first.process.send_signal(signal.SIGKILL)
    # Nobody has waited for it: it stays as a zombie.
    assert first.process.stdout.read() == ""
    until(FOUR, lambda: second.do("look"))


def test_one_killed_while_it_waits_in_a_process(start):
    first, second = start(1, 4), start(2, 4)
    first.do("join")
    second.begin("join")
    until(["a", "b"], lambda: first.do("look"))
    second.process.kill()
    second.process.wait()
    assert first.do("look") == FOUR


@pytest.mark.slow
def test_processes_at_the_same_time(start, tmp_path):
    (tmp_path / "used").mkdir()
    processes = [start(minimum, 8, PLACES_OF_FILES) for minimum in (1, 2, 3)]
    for each in processes:
        each.begin("play")
    assert all(each.end() for each in processes)
    assert not [*(tmp_path / "used").iterdir()]


PLACES_OF_FILES = [f"cpu:{index}" for index in range(8)]


def test_a_number_may_be_used_again():
    here = machine.SharedMachine()
    pid, started = here.process()
    assert here.runs(pid, started)
    assert not here.runs(pid, started - 100)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not here.runs(ended.pid, started)
