"""Which runs there are, where they run, and what is said of them."""

import errno
import io
import json
import os
import queue
import shutil
import signal
from unittest import mock

import pytest
import tensorflow as tf

from tests.limits import HANG_S
from towers.doctor.gpus import checks as nvidia
from towers.input_pipeline.cache import space
from towers.input_pipeline.pipeline import room
from towers.machine import limits
from towers.machine.nvml import Gpu
from towers.processes.strays import Strays
from towers.program import whole_file
from towers.queue import __main__ as program
from towers.queue import entry as states
from towers.queue import (
    queue_flags,
    record,
    runs,
    schedule,
    search,
    sequential,
    slots,
    table,
)
from towers.queue.entry import Entry
from towers.queue.process import Process
from towers.queue.queue_flags import QueueOptions
from towers.queue.runs import Run
from towers.queue.slots import Device, Slots
from towers.train.settings import Settings


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Returns a function that reads a command line, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def read(*argv) -> QueueOptions:
        return queue_flags.read(["towers.queue", *argv], "")

    return read


def run(name, count=1, folder="", **options):
    """A run that takes so many devices."""
    path = os.path.join(folder, name)
    return Run(name, Settings(num_gpus=count, model_dir=path, **options))


# Which runs.


def test_a_sweep_is_each_combination(read, tmp_path):
    found = read(
        *("--sweep", "learning_rate=1e-3,1e-2", "--sweep=model=mlp,cnn"),
        *("--train_epochs=3", "--queue_dir=q"),
    )
    assert [(each.name, each.model_dir) for each in found.runs] == [
        (name, str(tmp_path / "q" / name))
        for name in (
            "learning_rate=1e-3,model=mlp",
            "learning_rate=1e-3,model=cnn",
            "learning_rate=1e-2,model=mlp",
            "learning_rate=1e-2,model=cnn",
        )
    ]
    last = found.runs[-1].settings
    assert (last.learning_rate, last.model, last.train_epochs) == (0.01, "cnn", 3)
    assert runs.differing(found.runs) == ["model", "learning_rate"]


def test_values_with_commas_stand_in_quotes(read):
    found = read("--sweep", 'split_ratios="1,2",3', "--sweep=deterministic=true,false")
    assert [
        (each.settings.split_ratios, each.devices, each.settings.deterministic)
        for each in found.runs
    ] == [
        (("1", "2"), 2, True),
        (("1", "2"), 2, False),
        (("3",), 1, True),
        (("3",), 1, False),
    ]


def test_files_of_flags(read, tmp_path):
    (tmp_path / "one.flags").write_text("--model=mlp\n--seed=5\n--train_epochs=9\n")
    (tmp_path / "earlier").mkdir()
    earlier = Settings(model="cnn", dataset="digits", model_dir="earlier")
    (tmp_path / "earlier" / "flags.txt").write_text(earlier.as_text())
    # Flags may stand behind the files, and count more.
    one, two = read("one.flags", "earlier/flags.txt", "--train_epochs=2").runs
    assert (one.name, one.model_dir) == ("one", str(tmp_path / "runs/queue/one"))
    assert (one.settings.seed, one.settings.train_epochs) == (5, 2)
    assert (two.name, two.model_dir) == ("earlier", str(tmp_path / "earlier"))
    # What one file says is not left for the next one.
    assert (two.settings.model, two.settings.seed) == ("cnn", 0)


@pytest.mark.parametrize(("split", "devices"), [(1, 4), (2, 2), (4, 1)])
def test_a_run_has_devices_for_all_its_towers(read, split, devices):
    flags = f"--gpu_split={split}", "--split_ratios=1,1,2,2"
    (run,) = read("--sweep=seed=1", *flags).runs
    assert run.settings.num_gpus == devices


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        # What the line says of a part leaves the rest to the file.
        ("a.flags --max_bad_records=7", {"bad_records": "skip:7"}),
        ("a.flags --stall_seconds=60", {"on_stall": "stop:60"}),
        (
            "a.flags --batch_size_per_tower=16",
            {"batch_size": 16, "elastic_batch": "at_start"},
        ),
        ("a.flags --sweep layers=3", {"model_options": ("layers=3", "width=8")}),
        ("a.flags --sweep max_staleness=2", {"variable_update": "asynchronous:2"}),
    ],
)
def test_old_flags_are_for_all_runs_and_for_sweeps(read, tmp_path, argv, expected):
    (tmp_path / "a.flags").write_text(
        "--bad_records=skip\n--on_stall=stop\n--variable_update=asynchronous\n"
        "--model=transformer_lm\n--dataset=text:python\n--layers=4\n--width=8\n"
    )
    (settings,) = (each.settings for each in read(*argv.split()).runs)
    assert {name: getattr(settings, name) for name in expected} == expected


def test_files_are_combined_with_a_sweep(read, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.flags").write_text("--model=mlp\n")
    found = read("a.flags", "b.flags", "--sweep=seed=1,2").runs
    assert [each.name for each in found] == [
        *("a,seed=1", "a,seed=2", "b,seed=1", "b,seed=2")
    ]


def test_a_sweep_over_an_old_flag(read):
    flags = "--model=transformer_lm", "--dataset=text:python"
    runs_of = read(*flags, "--sweep", "layers=1,2").runs
    assert [run.settings.model_options for run in runs_of] == [
        ("layers=1",),
        ("layers=2",),
    ]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", "Received no runs; expected files of flags"),
        ("--sweep lerning_rate=1", r"--lerning_rate, .* mean --learning_rate\?"),
        ("--sweep learning_rate", "--sweep learning_rate; expected a flag and its"),
        ("--sweep =3", "--sweep =3; expected a flag and its values"),
        ("--sweep seed=1,,2", "--sweep seed=1,,2; expected a flag and its values"),
        ("--sweep seed=1 --sweep seed=2", "--sweep seed= 2 times; expected all of its"),
        ("--sweep seed=1,1", "two runs, seed=1 and seed=1, whose model_dir is .*/seed"),
        ("--sweep seed=1,2 --model_dir=x", "whose model_dir is .*/x; expected one for"),
        ("--sweep model_dir=a,b", "expected another flag, as each run has one of its"),
        ("--sweep seed=1,x", "seed=x: Received --seed=x; expected a whole number"),
        ("--sweep batch_size=8,0", "batch_size=0: .*--batch_size=0; expected at least"),
        (
            "--sweep seed=1 --gpu_split=2 --split_ratios=1,2,3",
            "=1,2,3 for 4 towers; expected one ratio for each, so give 4 of them[.]",
        ),
        (
            "--sweep split_ratios=1,2 --num_gpus=2",
            "=1: .*=1 for 2 towers; expected one",
        ),
        ("--sweep seed=1 --clean", "seed=1: Received --clean for a queue; expected no"),
        ("--sweep seed=1 --gpu_indices=0", "--gpu_indices=0 for a queue; .*_VISIBLE_D"),
        (
            "--sweep num_gpus=auto",
            "=auto: .*=auto, which only towers.train takes; expe",
        ),
        ("--sweep seed=1 --devices=0", "--devices=0; expected at least 1"),
        ("--sweep seed=1 --queue_dir=/proc/x", "Cannot write to the queue_dir /proc/x"),
        ("none.flags", "none: Unable to open flagfile"),
        (
            "model.flags",
            "model: Received --flagfile=model.flags, which is no text; exp",
        ),
        ("names.flags", "names: .*=names.flags, which names a file that is no text; e"),
        ("a.flags b.flags", "two runs, a and b, whose model_dir is .*/same; expected"),
        ("queue.flags", "queue: Received --sweep in a file; expected flags of towers"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(read, tmp_path, argv, said):
    for name in ("a", "b"):
        (tmp_path / f"{name}.flags").write_text("--model=mlp\n--model_dir=same\n")
    (tmp_path / "queue.flags").write_text("--sweep=seed=1\n")
    (tmp_path / "model.flags").write_bytes(b"PK\x03\x04\xff\xfe")
    (tmp_path / "names.flags").write_text("--flagfile=model.flags\n")
    with pytest.raises(ValueError, match=said):
        read(*argv.split())


def without_ray(monkeypatch):
    monkeypatch.setattr(queue_flags.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    "flag", ["--ray_tune", "--scheduler=asha:val_loss", "--search=random:3"]
)
def test_without_ray_the_command_that_installs_it_is_told(read, monkeypatch, flag):
    without_ray(monkeypatch)
    said = f"Received {flag}, but Ray is not installed; run: pip install"
    with pytest.raises(ValueError, match=said):
        read("--sweep=seed=1", flag)
    assert not read("--sweep=seed=1").ray_tune


def test_ray_starts_runs_where_it_is_installed(read, monkeypatch):
    monkeypatch.setattr(queue_flags.importlib.util, "find_spec", lambda name: name)
    found = read("--sweep=seed=1", "--scheduler=asha:val_loss")
    assert (found.ray_tune, found.scheduler) == (True, "asha:val_loss")
    assert not read("--sweep=seed=1", "--noray_tune").ray_tune
    with pytest.raises(ValueError, match="asha:loss with --noray_tune; expected one"):
        read("--sweep=seed=1", "--noray_tune", "--scheduler=asha:loss")


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        ("asha:val_loss", ("val_loss", "min")),
        ("asha:val_accuracy", ("val_accuracy", "max")),
        ("asha:max:val_loss", ("val_loss", "max")),
        ("asha:min:val_f1", ("val_f1", "min")),
    ],
)
def test_the_metric_of_a_scheduler(text, metric):
    assert search.metric(text) == metric


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("asha", "--scheduler=asha; expected asha and a metric"),
        ("asha:", "--scheduler=asha:; expected asha and a metric"),
        ("pbt:val_loss", "expected asha and a metric, such as asha:val_loss"),
        ("asha:most:val_loss", "expected asha and a metric"),
        ("asha:val_f1", "expected asha:min:val_f1 or asha:max:val_f1"),
    ],
)
def test_a_scheduler_that_is_none(text, said):
    with pytest.raises(ValueError, match=said):
        search.metric(text)


def test_what_a_search_says(read):
    assert search.samples("grid") is None
    assert search.samples("random:20") == 20
    for text in ("random", "random:0", "random:x", "bayes:3", ""):
        with pytest.raises(ValueError, match=f"--search={text}; expected grid, or ran"):
            search.samples(text)
    with pytest.raises(ValueError, match="a distribution; expected --search=random:20"):
        read("--sweep=learning_rate=loguniform:1e-5:1e-1")


def test_a_random_search_draws_the_same_runs_again(read):
    pytest.importorskip("ray.tune")
    flags = "--sweep=learning_rate=loguniform:1e-5:1e-1", "--sweep=seed=randint:2:9"
    flags += ("--sweep=model=mlp,cnn",)
    three = [each.name for each in read(*flags, "--search=random:3").runs]
    nine = read(*flags, "--search=random:9").runs
    assert [each.name for each in nine[:3]] == three
    assert len({each.name for each in nine}) == 9
    assert all(1e-5 <= each.settings.learning_rate <= 1e-1 for each in nine)
    assert {each.settings.seed for each in nine} <= {*range(2, 9)}
    assert {each.settings.model for each in nine} == {"mlp", "cnn"}
    # There are no more.
    assert len(read("--sweep=seed=1,2,3", "--search=random:9").runs) == 3


@pytest.mark.parametrize("text", ["uniform:1", "uniform:a:b", "loguniform:0:1"])
def test_a_distribution_that_is_none(read, text):
    pytest.importorskip("ray.tune")
    with pytest.raises(ValueError, match=f"{text}; expected the bounds of "):
        read(f"--sweep=learning_rate={text}", "--search=random:3")


# Where they run.


def cpus(count):
    return [Device(str(k)) for k in range(count)]


def test_devices_form_groups():
    five = Slots(cpus(5), 1, 6)
    assert [len(group) for group in five.groups(1)] == [1] * 5
    assert [[*map(str, group)] for group in five.groups(2)] == [
        ["CPU 0", "CPU 1"],
        ["CPU 2", "CPU 3"],
    ]
    twice = Slots(cpus(2), 2, 6).groups(1)
    assert [str(device) for (device,) in twice] == ["CPU 0", "CPU 1"] * 2


def test_threads_and_memory_are_divided():
    share = Slots(cpus(2), 2, 8)
    assert share.environ(share.devices, {"TF_NUM_INTEROP_THREADS": "7"}) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TF_NUM_INTRAOP_THREADS": "2",
        "TF_NUM_INTEROP_THREADS": "7",
        "TOWERS_MEMORY_SHARE": "0.5",
    }
    few = Slots(cpus(3), 1, 2).environ(cpus(1), {})
    assert few["TF_NUM_INTRAOP_THREADS"] == "1"


def test_gpus_are_named_and_their_memory_is_limited():
    gpus = [Device("2", True, 24_000), Device("GPU-abc", True, 16_000)]
    halves = Slots(gpus, 2, 16)
    environ = halves.environ(gpus, {"CUDA_VISIBLE_DEVICES": "2,GPU-abc,5"})
    assert environ["CUDA_VISIBLE_DEVICES"] == "2,GPU-abc"
    # The CPU's threads are for both.
    assert environ["TF_NUM_INTRAOP_THREADS"] == "8"
    both = run("a", 2)
    assert "--gpu_memory=7300" in halves.flags(both, gpus)
    assert "--gpu_memory=5650" in halves.flags(run("a", gpu_split=2), gpus[:1])
    mine = run("a", gpu_memory="500")
    assert "--gpu_memory=500" in halves.flags(mine, gpus[:1])
    whole = Slots(gpus, 1, 16).flags(both, gpus)
    assert not [flag for flag in whole if "gpu_memory_limit" in flag]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (run("a", 3), "a: Received --num_gpus=3, but the queue has 2 devices; expecte"),
        (run("a", max_gpus=4), "a: Received --max_gpus=4, but the queue has 2 devices"),
        (run("a", gpu_memory="9000"), "9000 with --runs_per_gpu=2; .* 7300"),
        (
            run("a", gpu_memory="growth"),
            "--gpu_memory=growth with --runs_per_gpu=2, which",
        ),
    ],
)
def test_a_run_that_would_never_have_room(asked, said):
    gpus = [Device("0", True, 24_000), Device("1", True, 16_000)]
    with pytest.raises(ValueError, match=said):
        Slots(gpus, 2, 16).check([run("b"), asked])


def test_too_many_runs_for_a_gpu():
    with pytest.raises(ValueError, match="=8 for GPU 0, which has 5,000 MB free"):
        Slots([Device("0", True, 5_000)], 8, 16)
    unknown = Slots([Device("0", True)], 2, 16)
    unknown.check([run("a", gpu_memory="500")])
    with pytest.raises(ValueError, match=r"a: .*=2 for GPUs whose memory NVIDIA"):
        unknown.check([run("a")])


CARDS = (
    Gpu(0, "GPU-a", 80_000, free_mb=79_000),
    Gpu(1, "GPU-b", 80_000, free_mb=20_000),
    Gpu(2, "GPU-c", 80_000, free_mb=79_500),
)


@pytest.fixture
def cards(monkeypatch):
    machine = nvidia.SeenMachine(3, 3, CARDS)
    monkeypatch.setattr(nvidia, "look", lambda **_: machine)


def test_gpus_that_others_hold_are_left_out(cards, monkeypatch, capsys):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert slots.of_this_machine(None, 1).count == 2
    assert capsys.readouterr().err == (
        "towers: GPU 1 is left out, as others hold 60,000 of its 80,000 MB; name it in "
        "CUDA_VISIBLE_DEVICES to use it.\n"
    )
    free = Device("0", True, 79_000), Device("2", True, 79_500)
    assert slots.of_this_machine(None, 1, {}).devices == free
    named = {"CUDA_VISIBLE_DEVICES": "GPU-b,0"}
    capsys.readouterr()
    found = slots.of_this_machine(None, 1, named).devices
    assert found == (Device("GPU-b", True, 20_000), Device("0", True, 79_000))
    assert not capsys.readouterr().err
    assert slots.of_this_machine(1, 1, {}).devices == free[:1]
    with pytest.raises(ValueError, match="--devices=3, but 2 GPUs of 3 can be used"):
        slots.of_this_machine(3, 1, {})


def test_without_gpus_there_is_a_device_for_each_core():
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
    found = slots.of_this_machine(None, 1, hidden)
    assert [*found.devices] == cpus(limits.cpu_count())
    assert [*slots.of_this_machine(5, 1, hidden).devices] == cpus(5)


def test_a_part_of_the_memory(monkeypatch):
    monkeypatch.delenv("TOWERS_MEMORY_SHARE", raising=False)
    options = tf.data.Options()
    room.limit(options, None)
    if not limits.memory().limited:
        assert not options.autotune.ram_budget
    whole, _ = space.room(None, False)
    monkeypatch.setenv("TOWERS_MEMORY_SHARE", "0.125")
    part, _ = space.room(None, False)
    # What is free changes all the time.
    assert 0.5 < 8 * part / whole < 2
    room.limit(options, None)
    assert 0.5 < options.autotune.ram_budget / part < 2
    assert space.room(None, True) == (2**30, 0.0)
    monkeypatch.setenv("TOWERS_MEMORY_SHARE", "2")
    with pytest.raises(ValueError, match="TOWERS_MEMORY_SHARE=2; expected the part"):
        limits.free_memory()


# The queue.


class Started:
    """A process that is none."""

    def __init__(self, flags, log, environ, told, ended):
        self.flags, self.log, self.environ = flags, log, environ
        self.tell = lambda **progress: told(self, {"progress": progress})
        self._ended = ended
        self.signals, self.code, self.reason = [], None, "its own mistake"
        self.signal = self.signals.append

    @property
    def exit_code(self):
        return self.code if self.code >= 0 else 128 - self.code

    def end(self, code):
        self.code = code
        self._ended(self)


class Played:
    """A queue whose processes do what the test says."""

    def __init__(self, folder, asked, devices=2):
        self.record = record.Record(str(folder))
        self.entries = schedule.entries(asked, self.record)
        self.processes = {}
        self.queue = sequential.Sequential(
            *(self.entries, Slots(cpus(devices), 1, 4), self.record, {"A": "b"}),
            self._start,
        )
        self._does = iter(())
        self.notes = []

    def _start(self, flags, log, environ, **calls):
        process = Started(flags, log, environ, **calls)
        self.processes[os.path.basename(os.path.dirname(log))] = process
        return process

    def play(self, *does):
        """Runs the queue, doing the next of these whenever it has shown something."""
        self._does = iter(does)
        self.queue.run(self._show)

    def _show(self, entries, note):
        self.notes.append(note)
        if does := next(self._does, None):
            does()

    @property
    def states(self):
        return {entry.run.name: entry.state for entry in self.entries}

    @property
    def running(self):
        return {name for name, state in self.states.items() if state == states.RUNNING}


def test_each_device_trains_one_run_after_another(tmp_path):
    asked = [run(name, folder=str(tmp_path)) for name in "abcd"]
    played, seen = Played(tmp_path, asked), []

    def end(name, code=0):
        seen.append(played.running)
        played.processes[name].end(code)

    played.play(
        lambda: end("a", 1),  # fails, and stops nobody
        lambda: end("c"),
        lambda: end("d"),
        lambda: end("b"),
    )
    assert seen == [{"a", "b"}, {"b", "c"}, {"b", "d"}, {"b"}]
    assert played.states == {
        **{"a": states.FAILED, "b": states.FINISHED},
        **{"c": states.FINISHED, "d": states.FINISHED},
    }
    assert played.entries[0].reason == "its own mistake"
    assert [*map(str, played.entries[3].devices)] == ["CPU 0"]
    process = played.processes["c"]
    assert process.flags == asked[2].settings.as_text().splitlines()
    assert process.log == str(tmp_path / "c" / "output.log")
    assert process.environ["A"] == "b"
    assert process.environ["TF_NUM_INTRAOP_THREADS"] == "2"


def test_runs_of_several_devices_share_groups_of_them(tmp_path):
    asked = [run("a", 1, str(tmp_path)), run("b", 2, str(tmp_path))]
    played, seen = Played(tmp_path, asked, 3), []
    played.play(
        lambda: (seen.append(played.running), played.processes["a"].end(0)),
        lambda: (seen.append(played.running), played.processes["b"].end(0)),
    )
    assert seen == [{"a"}, {"b"}]
    assert [len(entry.devices) for entry in played.entries] == [1, 2]


def test_what_a_run_tells_is_kept(tmp_path):
    played = Played(tmp_path, [run("a", folder=str(tmp_path))])
    told = []
    played.play(
        lambda: played.processes["a"].tell(step=10, loss=0.5),
        lambda: (
            told.append(played.entries[0].progress),
            played.processes["a"].end(0),
        ),
    )
    assert told == [{"step": 10, "loss": 0.5}]


def test_a_signal_has_all_save(tmp_path):
    asked = [run(name, folder=str(tmp_path)) for name in "abc"]
    played = Played(tmp_path, asked)
    played.play(
        lambda: played.queue.events.put(signal.SIGUSR1),
        lambda: played.queue.events.put(signal.SIGINT),
        lambda: played.processes["a"].end(143),
        lambda: played.processes["b"].end(0),  # it had just come to its end
    )
    assert played.states == {
        **{"a": states.STOPPED, "b": states.FINISHED, "c": states.WAITING},
    }
    a = played.processes["a"].signals
    assert a == [signal.SIGUSR1, signal.SIGTERM, signal.SIGCONT]
    assert (played.queue.stopped, played.notes[1]) == (signal.SIGINT, "")
    assert played.notes[-1].startswith("Stopping: the runs save.")


def test_whoever_insists_kills_the_runs(tmp_path):
    played = Played(tmp_path, [run("a", folder=str(tmp_path))])
    played.play(
        *[lambda: played.queue.events.put(signal.SIGTERM)] * 3,
        lambda: played.processes["a"].end(-9),
    )
    asked = [n for n in played.processes["a"].signals if n != signal.SIGCONT]
    assert asked == [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]
    assert played.states == {"a": states.STOPPED}


def test_a_process_that_cannot_be_started(tmp_path, monkeypatch):
    pipe = os.pipe()
    with monkeypatch.context() as patch, pytest.raises(IsADirectoryError):
        patch.setattr(os, "pipe", lambda: pipe)
        Process((), str(tmp_path), {}, None, None)
    assert not any(os.path.exists(f"/proc/self/fd/{end}") for end in pipe)
    played = Played(tmp_path, [run(name, folder=str(tmp_path)) for name in "ab"], 1)
    start = played._start

    def fail_first(flags, log, environ, **calls):
        if "/a/" in log:
            raise OSError("no more processes")
        return start(flags, log, environ, **calls)

    played.queue._starter = fail_first
    played.play(lambda: played.processes["b"].end(0))
    assert played.states == {"a": states.FAILED, "b": states.FINISHED}
    assert played.entries[0].reason == "Cannot start it: no more processes"


def test_a_record_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch, caplog):
    played = Played(tmp_path, [run(name, folder=str(tmp_path)) for name in "abc"])
    opened = whole_file.opened
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(whole_file, "opened", mock.Mock(side_effect=full))

    def make_room():
        monkeypatch.setattr(whole_file, "opened", opened)
        played.processes["b"].end(0)

    played.play(
        lambda: played.processes["a"].end(0),
        make_room,
        lambda: played.processes["c"].end(0),
    )
    assert {*played.states.values()} == {states.FINISHED}
    assert caplog.text.count("cannot be written (No space left on device), so a") == 1
    again = json.loads((tmp_path / record.FILE).read_text())
    assert len(again["finished"]) == 3  # the next write has all


@pytest.fixture
def failed(tmp_path):
    """A run that has been refused at once."""
    ended, reports = queue.SimpleQueue(), queue.SimpleQueue()
    process = Process(
        ["--no_such_flag=1"],
        str(tmp_path / "run" / "output.log"),
        dict(os.environ),
        told=lambda _, report: reports.put(report),
        ended=ended.put,
    )
    assert ended.get(timeout=HANG_S) is process
    return process


def test_why_a_run_has_failed_whose_folder_is_gone(tmp_path, failed):
    assert "no_such_flag" in failed.reason
    shutil.rmtree(tmp_path / "run")
    said = "exit code 1, and its log cannot be read (No such file or directory)"
    assert failed.reason == said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 1])
def test_how_a_run_was_killed(failed, monkeypatch, number):
    monkeypatch.setattr(type(failed), "code", -number)
    assert failed.reason in ("SIGKILL", f"signal {number}")


@pytest.mark.parametrize("line", ["[]", "1", "{", "[" * 9_999, "\xff"])
def test_a_report_that_is_none(failed, line):
    receive, send = os.pipe()
    with open(send, "w", encoding="latin-1") as file:
        file.write(f'{line}\n{{"progress": {{}}}}\n')
    reports = []
    failed._read(receive, lambda _, report: reports.append(report))
    assert reports == [{"progress": {}}]


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 9_999, '{"val_loss": "x", "steps": [], "val_a": 0.5}']
)
def test_a_summary_that_is_damaged(tmp_path, text):
    entry = Entry(run("a", folder=str(tmp_path)), devices=cpus(1))
    os.makedirs(entry.run.model_dir)
    (tmp_path / "a" / "summary.json").write_text(text)
    entry.end(0, "", is_stopping=False)
    stream = io.StringIO()
    table.QueueLines(stream)([entry], "")
    assert "a: finished" in stream.getvalue()
    assert len(table.final([entry])) == 2


def test_whatever_ends_the_queue_has_the_runs_save():
    strays = mock.Mock()
    waiting = mock.Mock()
    waiting.run.side_effect = MemoryError
    with pytest.raises(MemoryError):
        schedule.run(waiting, strays, mock.Mock(), mock.Mock())
    assert strays.mock_calls[1:] == [
        mock.call.signal(signal.SIGTERM),
        mock.call.end(record.SAVE_S),
    ]


# What is remembered.


def finish(kept, each):
    os.makedirs(each.model_dir, exist_ok=True)
    with open(os.path.join(each.model_dir, "summary.json"), "w") as file:
        json.dump({"steps": 1200, "val_accuracy": 0.5, "examples_per_sec": 10.0}, file)
    kept.finish(each)


def test_what_has_ended_well_does_not_run_again(tmp_path):
    a, b = (run(name, folder=str(tmp_path)) for name in "ab")
    finish(record.Record(str(tmp_path)), a)
    again = schedule.entries([a, b], record.Record(str(tmp_path)))
    assert [each.state for each in again] == [states.FINISHED, states.WAITING]
    # With other flags, it goes on.
    more = Run("a", a.settings.but(train_epochs=99))
    assert not record.Record(str(tmp_path)).is_finished(more)
    os.remove(tmp_path / "a" / "summary.json")
    assert not record.Record(str(tmp_path)).is_finished(a)


def test_a_pruned_run_waits_for_another_scheduler(tmp_path):
    a = run("a", folder=str(tmp_path))
    record.Record(str(tmp_path)).prune(a, "asha:val_loss")
    kept = record.Record(str(tmp_path))
    for scheduler, state in (
        ("asha:val_loss", states.PRUNED),
        ("asha:loss", states.WAITING),
        (None, states.WAITING),
    ):
        (entry,) = schedule.entries([a], kept, scheduler)
        assert entry.state == state
    more = Run("a", a.settings.but(train_epochs=99))
    assert not kept.is_pruned(more, "asha:val_loss")


def test_a_record_that_cannot_be_read(tmp_path, caplog):
    (tmp_path / record.FILE).write_text('{"finished": ')
    a = run("a", folder=str(tmp_path))
    kept = record.Record(str(tmp_path))
    assert "cannot be read" in caplog.text
    finish(kept, a)
    assert record.Record(str(tmp_path)).is_finished(a)


def test_what_a_killed_queue_has_left_is_ended(tmp_path, monkeypatch):
    first, second = (Strays(name=record.MARK) for _ in range(2))
    record.Record(str(tmp_path)).begin(first)
    ended = []
    monkeypatch.setattr(Strays, "processes", lambda self: [self.mark])
    monkeypatch.setattr(Strays, "end", lambda self, s: ended.append((self.mark, s)))
    record.Record(str(tmp_path)).begin(second)
    assert ended == [(first.mark, record.SAVE_S)]


def test_a_second_queue_is_refused(tmp_path):
    with record.alone(str(tmp_path)):
        with pytest.raises(ValueError, match=r"Another queue runs in .* --queue_dir"):
            with record.alone(str(tmp_path)):
                raise AssertionError
    with record.alone(str(tmp_path)):
        pass


# What is shown.


@pytest.fixture
def every(tmp_path, monkeypatch):
    """Entries of all states."""
    monkeypatch.chdir(tmp_path)
    found = [Entry(run(name, folder=str(tmp_path))) for name in "abcd"]
    a, b, c, _ = found
    finish(record.Record(str(tmp_path)), a.run)
    a.state, a.devices = states.FINISHED, [Device("0")]
    b.state, b.reason = states.FAILED, "Received x."
    c.state, c.devices = states.RUNNING, [Device("0"), Device("1")]
    c.progress = {"step": 1500, "loss": 0.25, "examples_per_sec": 12345.6}
    return found


def test_the_table_of_a_terminal(every):
    assert table.live(every) == [
        "run  state      step    loss  examples/sec  log, or why it failed",
        "a    finished                               a/output.log",
        "b    failed                                 Received x (see b/output.log)",
        "c    running   1,500  0.2500      12,345.6  c/output.log",
        "d    waiting                                d/output.log",
        "4 runs: 1 finished, 1 failed, 1 running, 1 waiting.",
    ]
    # Where there is no room, what happens now comes first.
    assert [line[:3].strip() for line in table.live(every, 4)] == [
        "run",
        "b",
        "c",
        "4 r",
    ]


def test_the_table_at_the_end(every):
    assert table.final(every) == [
        "run  state     steps  val_accuracy  examples/sec  model_dir, or why",
        "a    finished  1,200        0.5000          10.0  a",
        "b    failed                                       "
        "Received x (see b/output.log)",
        "c    running   1,500                              c",
        "d    waiting                                      d",
    ]


def test_the_last_metrics_of_a_pruned_run_are_shown(every, tmp_path):
    pruned = every[2]
    pruned.hear({"metrics": {"epoch": 3, "val_accuracy": 0.25}})
    pruned.state = states.PRUNED
    assert table.final(every)[3].split() == ["c", "pruned", "1,500", "0.2500", "c"]
    assert table.counts([pruned]) == "1 run: 1 pruned."
    assert table._described(pruned) == "pruned, val_accuracy 0.2500"


def test_lines_where_nobody_watches(every):
    stream = io.StringIO()
    lines = table.to(stream)
    lines(every, "")
    every[2].progress = {"step": 1600}
    lines(every, "")
    every[2].state = states.STOPPED
    lines(every, "Stopping.")
    every[3].state = states.FINISHED
    lines(every, "Stopping.")
    lines.end()
    assert stream.getvalue().splitlines() == [
        "a: finished, val_accuracy 0.5000",
        "b: failed: Received x (see b/output.log)",
        "c: running on CPU 0, CPU 1, log c/output.log",
        "Stopping.",
        "c: stopped",
        "d: finished before",
    ]


@pytest.mark.parametrize(
    ("on_ray", "each", "said"),
    [
        (False, 2, "1 run on CPU 0, CPU 1, 2 at once on each; 3 runs finished before."),
        (True, 1, "1 run on Ray, 2 devices at once; 3 runs finished before."),
    ],
)
def test_what_begins_is_said(every, on_ray, each, said):
    asked = QueueOptions("q", None, each, on_ray)
    assert program._begin(every, Slots(cpus(2), each, 4), asked) == said


def test_the_exit_code_is_that_of_the_runs(every, capsys):
    assert program._end(every[:1], None) == 0
    assert program._end(every, None) == 1
    said = "1 of 4 runs failed: b; start the same command again to try them again."
    assert capsys.readouterr().err == f"towers.queue: {said}\n"
    assert program._end(every, signal.SIGINT) == 130
    assert program._end(every, signal.SIGHUP) == 143


def test_a_terminal_is_drawn_again(every):
    now, stream = [0.0], io.StringIO()
    size = os.terminal_size((30, 24))
    screen = table.Screen(stream, lambda: size, lambda: now[0])
    screen(every, "")
    first = stream.getvalue()
    assert max(map(len, first.splitlines())) <= 29 + len("\x1b[J")
    screen(every, "")  # at once, and nothing has changed
    assert stream.getvalue() == first
    every[3].state = states.RUNNING
    screen(every, "")
    assert stream.getvalue().removeprefix(first).startswith("\x1b[6F\x1b[J")
    now[0] = 1.0
    screen(every, "Stopping.")
    screen.end()
    assert stream.getvalue().endswith("Stopping.\n\x1b[7F\x1b[J")
