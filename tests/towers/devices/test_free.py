"""GPUs that nobody uses, with a driver that is made up."""

import multiprocessing
import os

import pytest
import tensorflow as tf

from towers.devices import free
from towers.machine import nvml
from towers.machine.nvml import Gpu, Use
from towers.train.parts.devices import configured
from towers.train.settings import Settings

ME = os.getpid()
FREE, TAKEN = Use(0.01, {}, {}), Use(0.5, {ME: 0.4}, {})
# As of a container's processes, which are not seen outside.
HIDDEN = Use(0.5, {}, {})


class Driver:
    def __init__(self, *uses):
        self._uses = uses

    def use(self, uuid):
        return self._uses[int(uuid[-1])]


@pytest.fixture
def gpus(monkeypatch):
    """Has TensorFlow find so many GPUs, which nvidia-smi numbers from the end."""

    def found(count):
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind=None: ["gpu"] * count
        )
        cards = [Gpu(count - 1 - k, f"GPU-{k}", 1000) for k in range(count)]
        monkeypatch.setattr(nvml, "gpu", lambda index: cards[index])

    return found


@pytest.mark.parametrize(
    ("count", "uses", "expected"),
    [
        (None, [FREE, FREE], [0, 1]),
        (1, [FREE, FREE], [0]),
        (None, [TAKEN, FREE, HIDDEN, FREE], [1, 3]),
        (2, [TAKEN, FREE, HIDDEN, FREE], [1, 3]),
        (1, [HIDDEN, FREE], [1]),
        (None, [Use(0.02, {ME: 0.02}, {}), FREE], [1]),
    ],
)
def test_free_gpus(gpus, count, uses, expected):
    gpus(len(uses))
    assert free.choose(count, Driver(*uses)) == expected


def test_what_is_said(gpus, capsys):
    gpus(3)
    free.choose(None, Driver(TAKEN, FREE, HIDDEN))
    said = capsys.readouterr().err
    assert "towers: Of 3 GPUs, the run takes 1; GPU 2 is held by process " in said
    assert f"process {ME} of " in said
    assert "GPU 0 is held by processes that cannot be seen from here." in said


@pytest.mark.parametrize(
    ("count", "uses", "said"),
    [
        (None, [TAKEN, HIDDEN], "for a GPU, but none of 2 is free; .* GPU 1 is held"),
        (2, [FREE, TAKEN], "for 2 GPUs, but 1 of 2 is free; .* GPU 0 is held by"),
        (3, [FREE, FREE], "for 3 GPUs, but 2 of 2 are free"),
        (None, [FREE, None], "does not tell who uses GPU 1; expected numbers"),
        (None, [], "TensorFlow finds no GPU; expected --num_gpus"),
    ],
)
def test_too_few(gpus, count, uses, said):
    gpus(len(uses))
    with pytest.raises(ValueError, match=f"Received --gpu_indices=free.*{said}"):
        free.choose(count, Driver(*uses))


def test_a_gpu_without_a_number(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setattr(nvml, "gpu", lambda index: None)
    with pytest.raises(ValueError, match="does not tell who uses GPU 0"):
        free.choose(None, Driver(FREE))


def _choose(begun, go_on):
    with free.one_at_a_time():
        begun.set()
        go_on.wait(60)


def test_programs_choose_one_after_another(tmp_path, monkeypatch):
    monkeypatch.setenv("TOWERS_REGISTRY", str(tmp_path))
    context = multiprocessing.get_context("fork")
    first, second, go_on = context.Event(), context.Event(), context.Event()
    one = context.Process(target=_choose, args=(first, go_on))
    one.start()
    assert first.wait(60)
    other = context.Process(target=_choose, args=(second, go_on))
    other.start()
    assert not second.wait(0.3)
    go_on.set()
    assert second.wait(60)
    one.join()
    other.join()


def test_a_run_takes_them(monkeypatch, tmp_path):
    monkeypatch.setenv("TOWERS_REGISTRY", str(tmp_path))
    asked, found = [], []

    def choose(count):
        asked.append(count)
        return [3, 1]

    def configure(count, gpu_indices, **others):
        found.append((count, gpu_indices))

    monkeypatch.setattr(free, "choose", choose)
    monkeypatch.setattr(configured, "configure", configure)
    for more in ({}, {"num_gpus": 2}, {"num_gpus": 1, "max_gpus": 2}):
        configured.configure_devices(Settings(gpu_indices=("free",), **more))
    assert asked == [None, 2, 2]
    assert found == [(None, [3, 1]), (None, [3, 1]), (1, [3])]
