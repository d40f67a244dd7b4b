"""Runs of Keras's `fit` on hosts that come and go: they end as on one that stays."""

import collections
import contextlib
import functools
import itertools
import json
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.limits import HANG_S
from tests.towers.elastic import fits
from tests.towers.launch.launching import ROOT, launch
from tests.towers.train import runs
from tests.variants import slow
from towers.launch.elastic import slot as slot_module

# Enough for something to happen while hosts train.
MIDDLE = 24
# To hold nobody any more.
ALL = 1_000_000


def until(holds, what):
    """Waits until something holds, and returns it."""
    limit_s = time.monotonic() + HANG_S
    while not (found := holds()):
        if time.monotonic() > limit_s:
            raise AssertionError(f"It never holds: {what()}")
        threading.Event().wait(0.01)
    return found


class Run:
    """Launchers one after another, of one run."""

    def __init__(self, folder, **options):
        self.folder, self._opened = folder, contextlib.ExitStack()
        self.options, self.said = fits.with_defaults(options), []
        self.process, self._launched, self._seen = None, 0, -1
        self._earlier = frozenset()

    def start(self, hosts, *words, steps=ALL):
        """Launches hosts, which may do so many steps."""
        self.allow(steps)
        self._launched += 1
        self._seen = -1
        words = f"--hosts={hosts}", f"--log_dir={self.folder}", *words
        script = "tests.towers.elastic.fits"
        script = "-m", script, str(self.folder), json.dumps(self.options)
        environ = {"TOWERS_TEST_LAUNCHER": str(self._launched)}
        environ |= {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self.process = self._opened.enter_context(
            launch(*words, "--", *script, environ=environ, cwd=ROOT)
        )
        for stream in (self.process.stdout, self.process.stderr):
            reader = threading.Thread(target=self.said.extend, args=[stream])
            reader.start()
            self._opened.callback(reader.join)
        # Only where a test has failed does it run still.
        self._opened.callback(self.process.kill)

    def allow(self, steps):
        """Says how many steps there may be."""
        new = self.folder / "steps.new"
        new.write_text(str(steps))
        os.replace(new, self.folder / "steps")

    def lines(self):
        """What hosts have said of steps, each of its own in order."""
        found = []
        for file in self.folder.glob("steps-*"):
            text = file.read_text()
            whole = text[: text.rfind("\n") + 1].splitlines()
            found.extend(map(json.loads, whole))
        return found

    def begin(self, *slots):
        """Waits until a generation of these makes a step; returns their processes."""

        def found():
            every = {}
            for line in self.of_this_launcher():
                generation = line["generation"]
                if generation > self._seen and line["hosts"] == len(slots):
                    mine = every.setdefault(generation, {})
                    mine[line["slot"]] = line["pid"]
                    if {*mine} == {*slots}:
                        self._seen = generation
                        return mine
            return None

        return until(found, self.tell)

    def of_this_launcher(self):
        """The lines of processes that it has started."""
        return [each for each in self.lines() if each["pid"] not in self._earlier]

    def forget(self):
        """Has `begin` look only at processes that come from now on."""
        self._earlier = {each["pid"] for each in self.lines()}
        self._seen = -1

    def begin_without(self, gone):
        """Waits until a generation of others makes a step; returns their processes."""

        def found():
            lines = self.lines()
            newest = max((each["generation"] for each in lines), default=-1)
            lines = [each for each in lines if each["generation"] == newest]
            mine = {each["slot"]: each["pid"] for each in lines}
            is_whole = lines and len(mine) == lines[0]["hosts"]
            if is_whole and newest > self._seen and not gone & {*mine.values()}:
                self._seen = newest
                return mine
            return None

        return until(found, self.tell)

    def step(self, number):
        """Waits until so many steps are done on some host."""
        self.allow(number)
        until(lambda: max(self.steps(), default=0) >= number, self.tell)

    def steps(self):
        return [each["step"] for each in self.of_this_launcher()]

    def says(self, pattern):
        return until(lambda: re.search(pattern, "".join(self.said)), self.tell)

    def end(self, code=0):
        """Waits for the launcher, which has to end with this code."""
        until(lambda: self.process.poll() is not None, self.tell)
        assert self.process.returncode == code, self.tell()

    def finish(self, goes_back=False):
        """Has it train to the end; looks at all that it has done."""
        self.allow(ALL)
        self.end()
        self.check(goes_back)

    def check(self, goes_back=False):
        """Compares steps, history and weights with those of one plain model.

        `goes_back` says that it may have gone back to a checkpoint.
        """
        losses, history, weights = oracle(json.dumps(self.options))
        lines = self.lines()
        done = {each["step"] for each in lines}
        assert done == {*losses}, self.tell()
        for each in lines:
            expected = losses[each["step"]]
            assert {*each["logs"]} == {*expected}
            for name, value in each["logs"].items():
                assert abs(value - expected[name]) < 1e-5, (each, expected)
        if not goes_back:
            self.check_that_nothing_is_repeated(lines)
        results = [*self.folder.glob("result-*")]
        assert results, self.tell()
        for each in map(np.load, results):
            found = {name: each[name] for name in each if "arr_" not in name}
            assert {*found} == {*history}
            for name, values in found.items():
                np.testing.assert_allclose(values, history[name], atol=1e-5)
            for k, expected in enumerate(weights):
                np.testing.assert_allclose(each[f"arr_{k}"], expected, atol=1e-5)

    def check_that_nothing_is_repeated(self, lines):
        """What a host has done is not done again as long as it stays."""
        by_process, by_generation = {}, {}
        for each in lines:
            by_process.setdefault(each["pid"], []).append(each["step"])
            of_hosts = each["launcher"], each["generation"]
            mine = by_generation.setdefault(of_hosts, {})
            mine.setdefault(each["pid"], []).append(each["step"])
        for steps in by_process.values():
            assert steps == sorted({*steps}), steps
        for mine in by_generation.values():
            # All begin with the same step, and go on together.
            assert len({steps[0] for steps in mine.values()}) == 1, mine
            apart = max(map(len, mine.values())) - min(map(len, mine.values()))
            assert apart <= 1, mine
        a_call = self.options["steps_per_execution"]
        for before, after in itertools.pairwise(sorted(by_generation)):
            stayed = by_generation[before].keys() & by_generation[after].keys()
            if stayed:
                done = max(by_generation[before][pid][-1] for pid in stayed)
                begins = min(map(min, by_generation[after].values()))
                assert done < begins <= done + a_call, (done, begins)

    def tell(self):
        logs = [*self.folder.glob("*.log")]
        logs = [f"{each.name}: {each.read_text()[-3000:]}" for each in logs]
        lines = [
            " ".join(f"{name}={each[name]}" for name in _TOLD)
            for each in sorted(self.lines(), key=lambda each: each["time"])
        ]
        return "\n".join(["", *lines, "".join(self.said)[-6000:], *logs])

    def close(self):
        self._opened.close()


_TOLD = "generation", "hosts", "slot", "rank", "pid", "step"


@functools.cache
def oracle(options):
    """Losses by step, history and weights of a plain model on one device."""
    options, losses = json.loads(options), {}
    model = fits.plain_model(options)
    callbacks = [fits.steps_of(losses.__setitem__)]
    history = model.fit(**fits.arguments(options), callbacks=callbacks).history
    return losses, history, model.get_weights()


@pytest.fixture
def run(tmp_path, request):
    one = Run(tmp_path, **getattr(request, "param", {}))
    yield one
    one.close()


def options(**options):
    """A run with other options, as a parameter of slow tests."""
    name = "-".join(f"{name}={value}" for name, value in options.items()) or "plain"
    return slow(options, id=name)


def kill(*victims, number=signal.SIGKILL):
    for each in victims:
        os.kill(each, number)


def write(file, text):
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


# Others are wanted.


@pytest.mark.slow
@pytest.mark.parametrize(("least", "few", "many"), [(1, 1, 2), (2, 2, 3)])
def test_hosts_are_added_and_removed(run, least, few, many):
    file = run.folder / "hosts"
    file.write_text(str(few))
    run.start(f"{least}:{many}", f"--host_file={file}", steps=10)
    first = run.begin(*range(few))
    run.step(10)
    write(file, str(many))
    more = run.begin(*range(many))
    assert first.items() < more.items()
    run.step(20)
    write(file, str(few))
    fewer = run.begin(*range(few))
    assert fewer == first
    run.says(rf"Host {few} \(pid {more[few]}\) has left\.")
    run.finish()
    assert {each["hosts"] for each in run.lines()} == {few, many}


# One fails.


def fails_by_kill(run, pids, victim):
    kill(pids[victim])
    run.says(rf"Host {victim} \(pid {pids[victim]}\) failed: SIGKILL")


def fails_by_exception(run, pids, victim):
    (run.folder / f"raises-{victim}").touch()
    run.allow(MIDDLE)
    run.says(rf"Host {victim} \(pid {pids[victim]}\) failed: exit code 1")


@pytest.mark.parametrize(
    ("fails", "victim"),
    [
        slow(fails_by_kill, 0),
        slow(fails_by_kill, 1),
        slow(fails_by_exception, 0),
        slow(fails_by_exception, 1),
    ],
)
def test_one_fails_and_another_one_takes_its_place(run, fails, victim):
    run.start("1:2", steps=5)
    before = run.begin(0, 1)
    # Just now, they train.
    run.allow(MIDDLE)
    fails(run, before, victim)
    rest = run.begin(1 - victim)
    after = run.begin(0, 1)
    assert after[1 - victim] == rest[1 - victim] == before[1 - victim]
    assert after[victim] != before[victim]
    run.finish()


@pytest.mark.slow
def test_one_fails_where_none_may_be_missing(run):
    run.start("2:2", steps=11)
    before = run.begin(0, 1)
    run.step(11)
    kill(before[1])
    after = run.begin(0, 1)
    assert after[0] == before[0] and after[1] != before[1]
    run.finish()
    assert {each["hosts"] for each in run.lines()} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_all_are_killed(run, hosts):
    run.start(f"{hosts}:{hosts}", steps=20)
    before = run.begin(*range(hosts))
    run.step(20)
    kill(*before.values())
    run.forget()
    # From the last checkpoint, which was at the end of the second epoch.
    run.begin(*range(hosts))
    run.finish()
    lines = [each for each in run.lines() if each["pid"] not in {*before.values()}]
    assert min(each["step"] for each in lines) == 17


@pytest.mark.slow
def test_too_few_remain(run):
    run.start("2:2", "--join_seconds=20", steps=11)
    before = run.begin(0, 1)
    run.step(11)
    (run.folder / "fails-1").write_text("9")
    kill(before[1])
    run.end(137)
    run.says(r"1 host is ready \(.*\) after 20 s; expected 2 at least\.")
    (run.folder / "fails-1").unlink()
    # Whoever had to end has not lost what the checkpoints have.
    run.forget()
    run.start("1:1")
    run.finish()


@pytest.mark.slow
def test_only_so_many_restarts(run):
    run.start("1:2", "--max_restarts=1", steps=5)
    before = run.begin(0, 1)
    run.step(5)
    kill(before[1])
    run.begin(0)
    after = run.begin(0, 1)
    run.step(15)
    kill(after[1])
    run.end(137)
    run.says(r"after 1 restart of 1 \(--max_restarts\)\.")


@pytest.mark.slow
def test_no_more_restarts_than_allowed(run):
    run.start("1:2", "--max_restarts=2", steps=5)
    for count in (5, 15):
        before = run.begin(0, 1)
        run.step(count)
        kill(before[1])
        run.begin(0)
    run.begin(0, 1)
    run.finish()


@pytest.mark.slow
def test_one_that_keeps_failing_is_left_out(run):
    (run.folder / "fails-1").write_text("9")
    run.start("1:3")
    run.end()
    run.says(rf"{slot_module.TIMES} times running; it is left out, and 2 hosts may go")
    assert {each["slot"] for each in run.lines()} == {0, 2}
    run.check()


@pytest.mark.slow
@pytest.mark.parametrize("others", [{"epochs": 5}, {"seed": 8}])
def test_one_that_was_given_something_else_ends_alone(run, others):
    file = run.folder / "hosts"
    file.write_text("1")
    run.start("1:2", f"--host_file={file}", steps=5)
    first = run.begin(0)
    (run.folder / "options-1").write_text(json.dumps(others))
    write(file, "2")
    run.says(rf"{slot_module.TIMES} times running; it is left out, and 1 host may go")
    run.finish()
    assert {each["pid"] for each in run.lines()} == {*first.values()}


# Signals.


@pytest.mark.parametrize("victim", [0, slow(1)])
def test_one_that_is_asked_to_end_leaves_the_others(run, victim):
    run.start("1:2", steps=10)
    before = run.begin(0, 1)
    run.step(10)
    kill(before[victim], number=signal.SIGTERM)
    # It leaves after a step, and holds nobody.
    run.says(rf"Host {victim} \(pid {before[victim]}\) was stopped: exit code 143; it")
    assert run.begin(1 - victim).items() < before.items()
    run.finish()
    assert {each["pid"] for each in run.lines()} == {*before.values()}


@pytest.mark.slow
@pytest.mark.parametrize("again", ["1:1", "1:3"])
def test_all_are_asked_to_end(run, again):
    run.start("1:2", steps=12)
    run.begin(0, 1)
    run.step(12)
    run.process.send_signal(signal.SIGTERM)
    run.end(143)
    done = max(run.steps())
    # They train on until the coordinator has told all.
    assert 12 <= done < run.options["epochs"] * fits.STEPS_PER_EPOCH
    epoch, batch = divmod(done, fits.STEPS_PER_EPOCH)
    assert (run.folder / f"run/ckpt-{epoch}-{batch}").exists(), run.tell()
    assert "failed" not in "".join(run.said), run.tell()
    run.forget()
    run.start(again)
    run.finish()
    assert min(run.steps()) == done + 1


@pytest.mark.slow
def test_nothing_is_left_to_train(run):
    """Who comes then has what the first one has."""
    run.start("1:1")
    run.finish()
    run.start("2:2")
    run.finish()
    assert len([*run.folder.glob("result-*")]) == 3


# Other ways to train, and other data.


@pytest.mark.parametrize(
    "run",
    [
        options(validates=True),
        options(steps_per_execution=3),
        options(variable_update="replicated"),
        options(gpus=2),
        options(gpus=2, variable_update="replicated", validates=True),
        options(data="dataset"),
        options(data="pipeline"),
        options(data="pipeline", steps_per_execution=3, validates=True),
        options(data="dataset", validates=True),
    ],
    indirect=True,
)
def test_one_is_killed(run):
    run.start("1:2", steps=5)
    before = run.begin(0, 1)
    run.allow(MIDDLE)
    until(lambda: max(run.steps()) > 10, run.tell)
    kill(before[0])
    run.begin(1)
    after = run.begin(0, 1)
    assert after[1] == before[1]
    run.step(MIDDLE)
    run.step(MIDDLE + 1)
    kill(after[1])
    assert run.begin(0) == {0: after[0]}
    run.finish()


@pytest.mark.parametrize(
    "run",
    [
        options(),
        options(validates=True),
        options(data="dataset"),
        options(data="pipeline", validates=True),
        options(steps_per_execution=3),
        options(data="pipeline", steps_per_execution=3, validates=True),
    ],
    indirect=True,
)
@pytest.mark.slow
@pytest.mark.parametrize("epochs", [2, 6])
def test_one_is_killed_at_the_end_of_an_epoch(run, epochs):
    """Before it validates, or all meet; the last epoch is also the end of training."""
    end = epochs * fits.STEPS_PER_EPOCH
    run.start("1:2", steps=end)
    before = run.begin(0, 1)
    run.step(end)
    kill(before[0])
    if epochs < run.options["epochs"]:
        assert run.begin(1).items() < before.items()
    run.finish()


@pytest.mark.parametrize("run", [{"epochs": 30}], indirect=True)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens(run, seed):
    rng, gone, stopped = random.Random(seed), set(), set()
    kills = collections.Counter()
    file = run.folder / "hosts"
    file.write_text("3")
    run.start("1:3", f"--host_file={file}", steps=5)
    now = run.begin(0, 1, 2)
    for _ in range(10):
        run.step(max(run.steps()) + rng.randrange(1, 4))
        may_be_killed = [each for each in now if kills[each] < slot_module.TIMES - 1]
        events = ["arrival"] * bool(stopped) + ["kill"] * bool(may_be_killed)
        events += ["SIGTERM"] * (len(now) > 1)
        if not events:
            break
        event = rng.choice(events)
        run.allow(max(run.steps()) + 4)
        if event == "arrival":
            stopped.clear()
            write(file, "3")
        elif event == "kill":
            victim = rng.choice(may_be_killed)
            kills[victim] += 1
            gone.add(now[victim])
            kill(now[victim])
        else:
            victim = rng.choice([*now])
            stopped.add(victim)
            gone.add(now[victim])
            kill(now[victim], number=signal.SIGTERM)
        now = run.begin_without(gone)
    run.finish()


@pytest.mark.parametrize(
    "run",
    [
        options(is_built=False),
        options(is_built=False, data="dataset", validates=True),
        options(is_built=False, shard_embeddings="rows"),
        options(
            is_built=False, variable_update="replicated", shard_optimizer_state=True
        ),
        options(is_built=False, variable_update="auto"),
    ],
    indirect=True,
)
def test_one_comes_whose_model_is_not_built(run):
    """In the middle of an epoch; its variables are created with its first step."""
    file = run.folder / "hosts"
    file.write_text("1")
    run.start("1:2", f"--host_file={file}", steps=5)
    first = run.begin(0)
    run.step(5)
    write(file, "2")
    assert first.items() < run.begin(0, 1).items()
    run.finish()


# Hosts have parts of the variables.


DIVIDED = [
    options(
        gpus=gpus,
        variable_update="replicated",
        shard_optimizer_state=optimizer,
        shard_embeddings=tables,
    )
    for gpus, optimizer, tables in (
        (1, True, "none"),
        (2, False, "rows"),
        (2, True, "rows"),
    )
]


@pytest.mark.parametrize("run", DIVIDED, indirect=True)
def test_parts_are_handed_on(run):
    file = run.folder / "hosts"
    file.write_text("2")
    run.start("1:3", f"--host_file={file}", steps=10)
    first = run.begin(0, 1)
    run.step(10)
    write(file, "3")
    three = run.begin(0, 1, 2)
    assert first.items() < three.items()
    run.step(20)
    # The first host writes a checkpoint before it leaves.
    kill(three[0], number=signal.SIGTERM)
    two = run.begin(1, 2)
    assert two.items() < three.items()
    run.step(22)
    kill(three[2], number=signal.SIGTERM)
    assert run.begin(1).items() < two.items()
    run.step(28)
    write(file, "2")
    run.begin_without({three[0], three[2]})
    run.finish()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("run", DIVIDED, indirect=True)
def test_one_goes_with_its_part(run, victim):
    run.start("1:2", steps=12)
    before = run.begin(0, 1)
    run.step(12)
    saved = run.folder / "run" / "ckpt-1-0"
    until(saved.exists, run.tell)
    kill(before[victim])
    rest = run.begin(1 - victim)
    assert rest.items() < before.items()
    run.says(rf"goes back to {saved}")
    run.step(MIDDLE)
    run.says(r"Step 8: \d -> \d tower.*; \d+\.\d\d s from step to step, 4 steps lost\.")
    steps = [each["step"] for each in run.lines() if each["pid"] == before[1 - victim]]
    assert steps[:16] == [*range(1, 13), *range(9, 13)]
    run.finish(goes_back=True)
    assert "".join(run.said).count("goes back to") == 1


@pytest.mark.slow
@pytest.mark.parametrize("run", DIVIDED[-1:], indirect=True)
def test_one_that_was_given_something_else_keeps_no_part(run):
    file = run.folder / "hosts"
    file.write_text("2")
    run.start("1:3", f"--host_file={file}", steps=5)
    first = run.begin(0, 1)
    run.step(5)
    (run.folder / "options-2").write_text(json.dumps({"seed": 8}))
    write(file, "3")
    run.says(rf"{slot_module.TIMES} times running; it is left out, and 2 hosts may go")
    run.finish()
    assert {each["pid"] for each in run.lines()} == {*first.values()}


@pytest.mark.slow
@pytest.mark.parametrize("run", DIVIDED[-1:], indirect=True)
def test_one_goes_with_its_part_before_any_checkpoint(run):
    run.start("1:2", steps=4)
    before = run.begin(0, 1)
    run.step(4)
    kill(before[1])
    run.says("there is no checkpoint")
    after = run.begin(0, 1)
    assert not {*before.values()} & {*after.values()}
    run.finish(goes_back=True)


# The program.


# Without a ReLU: where rounding decides on which side of 0 an output is, the weights
# of two equal runs part, and nobody has lost a step.
SMOOTH = (ROOT / "scripts/elastic/smooth.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        options(),
        options(data="dataset"),
        options(data="pipeline", steps_per_execution=3),
        options(gpus=2, variable_update="replicated"),
    ],
    indirect=True,
)
def test_who_comes_has_traced_its_step_before(run):
    file = run.folder / "hosts"
    file.write_text("1")
    run.start("1:2", f"--host_file={file}", steps=5)
    first = run.begin(0)
    write(file, "2")
    both = run.begin(0, 1)
    run.step(MIDDLE)
    # Alone, it is traced again by whoever comes first, who has traced for itself.
    kill(both[0])
    run.begin(1)
    again = run.begin(0, 1)
    assert again[1] == both[1] and first[0] == both[0] != again[0]
    run.finish()
    traced = {each["pid"]: each["traced_in"] for each in run.lines()}
    # The first one begins a generation of its own, and traces one of two hosts.
    assert set(traced[first[0]]) == {0, 1}
    assert traced[both[1]][0] is None and 1 not in traced[both[1]]
    assert {*traced[again[0]]} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("run", [{"epochs": 30}], indirect=True)
def test_graphs_of_a_place_are_kept(run):
    """A host that is alone for the second time traces nothing."""
    run.start("1:2", steps=5)
    for more in (MIDDLE, 2 * MIDDLE):
        kill(run.begin(0, 1)[1])
        run.allow(more)
        run.begin(0)
    alone = {}
    for each in run.lines():
        if each["hosts"] == 1:
            alone.setdefault(each["generation"], set()).add(each["graph"])
    first, second = (alone[generation] for generation in sorted(alone))
    assert len(first) == 1 and first == second, run.tell()
    run.finish()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_program(tmp_path, victim):
    (tmp_path / "smooth.py").write_text(SMOOTH)
    flags = "--dataset=synthetic:4x4x1:3:1472", "--deterministic"
    flags += (f"--model={tmp_path}/smooth.py",)
    flags += "--variable_update=parameter_server", "--num_gpus=1", "--train_epochs=60"
    alone, folder = tmp_path / "alone", tmp_path / "run"
    runs.run(*flags, f"--model_dir={alone}")
    environ = {
        **{"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        "PYTHONUNBUFFERED": "1",
    }
    words = "--hosts=1:2", "--", *flags, f"--model_dir={folder}"
    with launch(*words, environ=environ, cwd=ROOT) as process:
        runs.wait_for(process, "epoch 2/")
        before = _hosts_of(process)
        assert {*before} == {0, 1}
        kill(before[victim])
        out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, out + err
    found, expected = (runs.summary_of(each) for each in (folder, alone))
    for name in ("val_loss", "val_accuracy"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
    for ours, theirs in zip(*map(runs.weights, (folder, alone)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    generations = found["generations"]
    counts = [len(each["towers"]) for each in generations]
    assert counts[:2] == [2, 1], generations
    steps = [each["step"] for each in generations]
    assert steps == sorted({*steps}) and steps[0] == 0, generations
    assert re.search(r"host \d \(\S+, pid \d+\) has ended", generations[1]["why"])
    assert all(each["steps_lost"] == 0 for each in generations), generations


def _hosts_of(process):
    """The launcher's processes, by their slots."""
    found = {}
    for file in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for pid in map(int, file.read_text().split()):
            environ = Path(f"/proc/{pid}/environ").read_text()
            if known := re.search(r"TOWERS_SLOT=(\d+)", environ):
                found[int(known[1])] = pid
    return found
