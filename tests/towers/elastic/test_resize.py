"""Runs that are asked for other towers, by files or by the program."""

import dataclasses
import fcntl
import json
import os
import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.limits import HANG_S
from tests.towers.train.runs import finish, start, summary_of, wait_for
from towers.devices.configuration import Devices
from towers.elastic import requests
from towers.elastic.generations import Generation, Generations
from towers.elastic.requests import Inbox, Request, RunError
from towers.elastic.resize import Asked
from towers.model import auto
from towers.resize import __main__ as program
from towers.resize import arguments

GPUS = tuple(f"/device:GPU:{k}" for k in range(4))


@pytest.fixture
def locked(tmp_path):
    """A model_dir in which a run seems to train."""
    with open(tmp_path / requests.LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield tmp_path


def asked(folder, request, seconds=HANG_S):
    """Asks in a thread; returns a function that waits for what comes back."""
    found = []

    def ask():
        try:
            found.append(requests.ask(str(folder), request, seconds))
        except RunError as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()

    def answer():
        thread.join(HANG_S)
        return found[0]

    return answer


def taken(inbox):
    """Waits for a request to come."""
    end = threading.Event()
    while (request := inbox.take()) is None:
        end.wait(0.01)
    return request


def test_a_request_and_its_answer(locked):
    request = Request.new(num_gpus=3, split_ratios=(1, 2, 3))
    answer = asked(locked, request)
    inbox = Inbox(str(locked))
    assert taken(inbox) == request
    assert inbox.take() is None
    inbox.answer(Request.new(num_gpus=1), done="of another")
    inbox.answer(request, done="Done.")
    assert answer()["done"] == "Done."


def test_a_refusal(locked):
    answer = asked(locked, Request.new(num_gpus=9))
    inbox = Inbox(str(locked))
    inbox.answer(taken(inbox), refused="There are 4.")
    assert str(answer()) == "There are 4."


def test_nobody_answers(locked, tmp_path):
    with pytest.raises(RunError, match=r"did not answer within 0\.01 s"):
        requests.ask(str(locked), Request.new(num_gpus=1), 0.01)
    assert not (tmp_path / "resize.json").exists()


def test_no_run(tmp_path):
    assert not requests.is_running(str(tmp_path))
    with pytest.raises(RunError, match="has ended, or has not begun"):
        requests.ask(str(tmp_path), Request.new(num_gpus=1), HANG_S)


def _like_ours(**changes):
    ours = {"key": "a", "num_gpus": 1, "gpu_indices": [], "split_ratios": []}
    return json.dumps(ours | changes)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '{"key": 1}', '{"a": [1]}', "[" * 100_000),
        _like_ours(num_gpus="three"),
        _like_ours(num_gpus=-1),
        _like_ours(num_gpus=None),
        _like_ours(num_gpus=True),
        _like_ours(gpu_indices=[0]),
        _like_ours(num_gpus=None, gpu_indices=[-1]),
        _like_ours(num_gpus=None, gpu_indices=["a"]),
        _like_ours(split_ratios=[0]),
        _like_ours(key=5),
    ],
)
def test_what_nobody_of_ours_has_written(tmp_path, text):
    (tmp_path / "resize.json").write_text(text)
    assert Inbox(str(tmp_path)).take() is None
    assert not (tmp_path / "resize.json").exists()


def test_folders_in_the_place_of_files(tmp_path, capsys):
    for name in requests.FILES:
        (tmp_path / name).mkdir()
    inbox = Inbox(str(tmp_path))
    inbox.clear()
    assert inbox.take() is None
    inbox.answer(Request.new(num_gpus=1), done="Done.")
    assert "answer to towers resize cannot be written" in capsys.readouterr().err


def test_a_request_that_was_taken_is_not_said_to_be_unheard(locked):
    answer = asked(locked, Request.new(num_gpus=3), seconds=0.5)
    taken(Inbox(str(locked)))
    assert "changes its towers, but came to no end" in str(answer())


def test_the_first_of_two_requests_hears_of_the_second_at_once(locked):
    answer = asked(locked, Request.new(num_gpus=3))
    while not (locked / "resize.json").exists():
        threading.Event().wait(0.01)
    second = dataclasses.asdict(Request.new(num_gpus=2))
    requests._write(str(locked), "resize.json", second)
    assert "came before the run saw this one" in str(answer())


def test_requests_of_an_earlier_run_are_forgotten(tmp_path):
    (tmp_path / "resize.json").write_text(json.dumps({"key": "a", "num_gpus": 1}))
    assert Asked(str(tmp_path), Devices(GPUS, GPUS[0])).look() is None


@pytest.mark.parametrize(
    ("devices", "request_", "expected"),
    [
        (Devices(GPUS, "", (0, 1, 2, 3)), {"num_gpus": 3}, GPUS[:3]),
        (Devices(GPUS, "", (2, 0, 3, 5)), {"gpu_indices": (5, 2)}, GPUS[3::-3]),
        (Devices(GPUS, "", (1, 1, 4, 4)), {"gpu_indices": (4,)}, GPUS[2:]),
        (Devices(GPUS, "", (1, 1, 4, 4)), {"num_gpus": 1}, GPUS[:2]),
        (Devices(GPUS, ""), {"gpu_indices": (2, 0)}, (GPUS[2], GPUS[0])),
    ],
)
def test_which_devices_are_meant(tmp_path, devices, request_, expected):
    source = Asked(str(tmp_path), devices)
    (tmp_path / "resize.json").write_text(
        json.dumps({"key": "a", "gpu_indices": (), "split_ratios": (), **request_})
    )
    assert tuple(source.look().gpus) == expected


@pytest.mark.parametrize(
    ("devices", "request_", "message"),
    [
        (
            Devices(GPUS, "", (0, 1, 2, 3)),
            {"num_gpus": 5},
            "this run has set up 4 GPUs; start it with --max_gpus=5",
        ),
        (
            Devices(GPUS, "", (2, 0, 3, 5)),
            {"gpu_indices": (1,)},
            "--gpu_indices with 1, but this run has set up the GPUs 2, 0, 3, 5;",
        ),
        (Devices(GPUS, ""), {"num_gpus": 7}, "has set up 4 logical CPUs"),
    ],
)
def test_devices_that_are_not_set_up(tmp_path, devices, request_, message):
    source = Asked(str(tmp_path), devices)
    (tmp_path / "resize.json").write_text(
        json.dumps({"key": "a", "gpu_indices": (), "split_ratios": (), **request_})
    )
    assert source.look() is None
    assert message in answers(tmp_path)["refused"]


def test_another_request_comes_before(locked):
    first, second = Request.new(num_gpus=3), Request.new(num_gpus=2)
    requests._write(str(locked), "resize.json", dataclasses.asdict(second))
    real = requests._write
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(requests, "_write", lambda *args: None)
        with pytest.raises(RunError, match=r"Another request to .* came before"):
            requests.ask(str(locked), first, 0.01)
    assert requests._write is real
    assert Inbox(str(locked)).take() == second


@pytest.mark.slow
def test_the_end_of_the_data_answers(tmp_path):
    """Of data of unknown length, Keras begins a batch that does not come."""
    parallel, x, y = model_and_data()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).filter(lambda *_: True)
    asks = Asks(tmp_path, {9: {"num_gpus": 3}})
    resize = towers.callbacks.Resize(tmp_path, clock=asks.clock)
    parallel.fit(data, verbose=0, callbacks=[resize, asks])
    assert answers(tmp_path)["done"] == "The run has ended, with no step more."
    parallel.fit(data, verbose=0, callbacks=[resize])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Received no MODEL_DIR; expected it: Folder of a"),
        (["d"], "neither --num_gpus nor --gpu_indices"),
        (["d", "--num_gpus=1", "--gpu_indices=0"], "both --num_gpus and --gpu_indices"),
        (["d", "--num_gpus=0"], "--num_gpus=0; expected at least 1"),
        (["d", "--num_gpus=x"], "--num_gpus=x; expected a whole number"),
        (["d", "--gpu_indices=a"], "--gpu_indices=a; expected numbers from 0"),
        (["d", "--gpu_indices=1,1"], "expected each GPU once"),
        (["d", f"--gpu_indices={'1' * 5000}"], "expected numbers from 0, such as"),
        (["", "--num_gpus=1"], "Received no MODEL_DIR; expected it: Folder"),
        (["d", "--num_gpus=1", "--split_ratios=0"], "expected numbers from 1"),
        (["d", "--num_gpus=1", "--wait_seconds=0"], "--wait_seconds=0.0; expected"),
        (["d", "--num_gpus=1", "--wait_seconds=nan"], "--wait_seconds=nan; expected"),
        (["d", "--gpus=1"], "no such flag (did you mean --num_gpus?)"),
    ],
)
def test_arguments_are_checked(argv, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        arguments.read(["", *argv], "What it is for.")


def test_the_program_says_that_no_run_trains(tmp_path, capsys):
    assert program.main(["", str(tmp_path), "--num_gpus=2"]) == 1
    assert (
        "where no run trains; expected the model_dir of one" in capsys.readouterr().err
    )


def test_the_program_says_what_the_run_answers(locked, capsys, monkeypatch):
    monkeypatch.setattr(requests, "ask", lambda folder, asked, s: {"done": "It has."})
    assert program.main(["", str(locked), "--num_gpus=2"]) == 0
    assert capsys.readouterr().out == "It has.\n"

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(requests, "ask", stopped)
    assert program.main(["", str(locked), "--num_gpus=2"]) == 130


def model_and_data(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    parallel = towers.multi_gpu_model(model, gpus=2, **options)
    parallel.compile("sgd", "mse")
    return parallel, np.ones([40, 4]), np.ones([40, 2])


class Asks(keras.callbacks.Callback):
    """Writes a request as some batch ends, and has the next one look for it."""

    def __init__(self, folder, requests_):
        super().__init__()
        self.folder, self.requests, self.now_s = folder, requests_, 0.0

    def clock(self):
        return self.now_s

    def on_train_batch_end(self, batch, logs=None):
        self.now_s += 1
        if batch in self.requests:
            requests._write(
                str(self.folder),
                "resize.json",
                {"key": str(batch), "gpu_indices": (), "split_ratios": ()}
                | self.requests[batch],
            )


def answers(folder):
    return json.loads((folder / "resize_answer.json").read_text())


def fit(folder, requests_, **options):
    parallel, x, y = model_and_data()
    asks = Asks(folder, requests_)
    resize = towers.callbacks.Resize(folder, clock=asks.clock, **options)
    parallel.fit(x, y, batch_size=4, verbose=0, callbacks=[resize, asks])
    return parallel, resize


@pytest.mark.slow
def test_the_callback(tmp_path, capsys):
    parallel, resize = fit(tmp_path, {2: {"num_gpus": 3}, 5: {"gpu_indices": [1]}})
    assert parallel.builder.plan.devices == ("/device:CPU:1",)
    every = resize.generations.every
    assert [(each.step, len(each.towers), each.why) for each in every] == [
        (0, 2, "start"),
        (3, 3, "towers resize"),
        (6, 1, "towers resize"),
    ]
    assert [each.steps_lost for each in every] == [0, 0, 0]
    line = (
        "Step 6: 3 -> 1 tower (/device:CPU:1), by towers resize; 1.00 s from step to "
        "step, 0 steps lost."
    )
    assert answers(tmp_path) == {"key": "5", "done": line}
    assert f"towers: {line}" in capsys.readouterr().err
    assert resize.marks()[1] == line
    assert not resize.marks()
    assert resize.measured() == {"towers": 1}


def test_a_request_for_the_towers_of_a_race_changes_nothing(tmp_path, monkeypatch):
    """The candidate makes calls of its own from the fourth on."""
    for name, value in {"_ROUND_S": 0.0, "BUDGET_S": 1e9, "OF_SHORT_RUN": 1e9}.items():
        monkeypatch.setattr(auto, name, value)
    monkeypatch.setattr(auto, "_ROUNDS", 1)
    parallel, x, y = model_and_data(variable_update="auto")
    asks, choosing = Asks(tmp_path, {3: {"num_gpus": 2}}), []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            choosing.append((self.model.is_choosing, self.model.builder.name))

    resize = towers.callbacks.Resize(tmp_path, clock=asks.clock)
    callbacks = [resize, asks, Notes()]
    parallel.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)
    assert choosing[3] == (True, "replicated")
    assert "has these towers already" in answers(tmp_path)["done"]
    assert len(resize.generations.every) == 1


def test_a_script_can_be_asked(tmp_path):
    """The callback has the folder locked, by which `towers resize` finds the run."""

    class Looks(keras.callbacks.Callback):
        found = ()

        def on_train_batch_end(self, batch, logs=None):
            self.found += (requests.is_running(str(tmp_path)),)

    looks = Looks()
    parallel, x, y = model_and_data()
    resize = towers.callbacks.Resize(tmp_path)
    parallel.fit(x, y, verbose=0, callbacks=[resize, looks])
    assert looks.found and all(looks.found)
    assert not requests.is_running(str(tmp_path))


def test_the_callback_refuses(tmp_path):
    parallel, resize = fit(tmp_path, {2: {"num_gpus": 3, "split_ratios": (1, 2)}})
    assert len(resize.generations.every) == 1
    assert "split_ratios=(1, 2) for 3 towers" in answers(tmp_path)["refused"]
    assert parallel.builder.plan.count == 2


def test_only_other_ratios_are_told_as_that(tmp_path):
    fit(tmp_path, {2: {"num_gpus": 2, "split_ratios": (1, 3)}})
    assert answers(tmp_path)["done"].startswith(
        "Step 3: split ratios 1:1 -> 1:3, by towers resize; "
    )


def test_the_same_towers(tmp_path):
    fit(tmp_path, {2: {"num_gpus": 2}})
    assert "has these towers already" in answers(tmp_path)["done"]


def test_a_check_of_the_runs_own(tmp_path):
    def check(devices, ratios):
        raise ValueError(f"{devices} are too many.")

    fit(tmp_path, {2: {"num_gpus": 3}}, check=check)
    assert answers(tmp_path)["refused"] == "3 are too many."


def test_generations_are_known_to_a_run_that_goes_on():
    before, after = Generations(), Generations()
    before.begin(Generation(0, ["a", "b"], "start"))
    before.begin(Generation(5, ["a"], "towers resize", 0.1))
    after.begin(Generation(7, ["a", "b"], "restart"))
    after.recall(json.loads(json.dumps(before.as_json())))
    assert [each.step for each in after.every] == [0, 5, 7]
    assert after.every[1] == Generation(5, ["a"], "towers resize", 0.1)


@pytest.mark.slow
def test_a_run_of_the_program(tmp_path):
    folder = tmp_path / "run"
    flags = ("--dataset=synthetic:4x4x1:3:1472", "--model=mlp", "--max_gpus=4")
    flags += ("--deterministic", "--log_steps=10", f"--model_dir={folder}")
    process = start(*flags, "--train_epochs=200")
    wait_for(process, "step 10/")
    said = []
    for argv in (["--num_gpus=4"], ["--gpu_indices=3,1", "--split_ratios=2,1"]):
        assert program.main(["", str(folder), *argv]) == 0
    assert program.main(["", str(folder), "--num_gpus=9"]) == 1
    process.send_signal(2)
    done = finish(process)
    assert done.returncode == 130, done.stderr
    said = re.findall(r"^towers: (Step .*)$", done.stderr, re.M)
    assert len(said) == 2
    assert re.match(r"Step \d+: 2 -> 4 towers \(.*\), by towers resize; ", said[0])
    epochs = [*map(int, re.findall(r"^epoch (\d+)/", done.stdout, re.M))]
    done = finish(start(*flags, f"--train_epochs={max(epochs) + 2}"))
    assert done.returncode == 0, done.stderr
    whys = [each["why"] for each in summary_of(folder)["generations"]]
    assert whys == ["start", "towers resize", "towers resize", "restart"]
    tags = [f for f in os.listdir(folder / "train") if "tfevents" in f]
    assert b"resize" in b"".join((folder / "train" / f).read_bytes() for f in tags)
