"""Finds split ratios with which all towers take about as long, while a run trains.

How long a tower would take for other rows is a guess, as devices slow each other down.
So a guess is tried for 30 steps, and measured again; the best that was measured stays.
Each guess traces a step.
"""

import math
import os
from collections.abc import Callable, Sequence

import tensorflow as tf

from towers.devices.names import is_gpu
from towers.elastic.generations import Wish
from towers.keras_adapter.runtime import device_memory_limits
from towers.model import remembered
from towers.model.tower_model import TowerModel
from towers.monitoring.bottleneck import uneven
from towers.monitoring.step_time import Split
from towers.plan import Tower
from towers.program import voice

# Other ratios are tried if the slowest tower would take at most so much of its time.
_WORTH = 0.95
# Each traces a step, and measures it.
_MOST_TRIALS = 4
# Of a device's memory, what other ratios may be expected to take.
_SAFE = 0.9


class Balance:
    """Split ratios by the time that each tower takes, as a source of `Resize`.

    It measures the towers for some steps, asks for the ratios with which all would take
    as long, and measures again, until others promise no more. The best ones that were
    measured stay, and are kept in a file: from then on, and in runs that continue,
    nothing is measured. No tower gets a part for which its GPU may lack memory, if
    what it takes grows with its part.
    """

    def __init__(
        self,
        model: TowerModel,
        file: str | os.PathLike,
        *,
        steps: int = 30,
        warmup_steps: int = 10,
        headroom: Callable[[Tower], float] | None = None,
    ):
        """Measures nothing yet.

        Args:
            model: Its towers, on one host.
            file: Where to keep what is found.
            steps: How many steps to measure with the same ratios.
            warmup_steps: Steps before, in which graphs are built.
            headroom: Returns how many times its part of a batch a tower's memory
                suffices for. By default as TensorFlow's allocator tells it; without
                limit on a CPU.
        """
        self._model, self._file = model, os.fspath(file)
        self._steps, self._warmup = steps, warmup_steps
        self._headroom = headroom or _headroom
        self._builder = self._towers = self._search = None

    def look(self) -> Wish | None:
        """Returns a wish for other ratios, once towers were measured."""
        if self._model.builder is not self._builder:
            self._follow(self._model.builder)
        return next(self._search, None)

    def _follow(self, builder):
        """Measures what another builder does; for other devices, all begins anew."""
        before, self._builder = self._towers, builder
        self._towers = builder.plan.replicas
        self._since, self._warm = builder.timers.totals(), False
        if before is None or _devices(before) != _devices(self._towers):
            self._search = self._find() if len(self._towers) > 1 else iter(())
            if not uneven.comparable(len(self._towers), builder.plan.on_gpus):
                self._search = iter(())
                _say(
                    f"Split ratios stay {_text(self._ratios)}: there are more logical "
                    "CPUs than cores, so the times of towers are not their own."
                )

    def _find(self):
        """Yields a wish, or `None` if there is none yet, whenever somebody looks."""
        remembered = recall(self._file, _devices(self._towers))
        if remembered is not None:
            if remembered != self._ratios:
                yield self._wish("found", remembered)
            return
        measured = {}
        while True:
            while (towers_ms := self._measure()) is None:
                yield None
            measured[self._ratios] = towers_ms
            better = self._better(towers_ms)
            if better in measured or len(measured) == _MOST_TRIALS:
                break
            yield self._wish("tries", better)
        best = min(measured, key=lambda ratios: max(measured[ratios]))
        if best != self._ratios:
            yield self._wish("found", best)
        self._keep(measured, best)

    def _measure(self):
        """Returns the time of each tower, once there were enough steps."""
        totals = self._builder.timers.totals()
        since = totals.since(self._since)
        if since.steps < (self._steps if self._warm else self._warmup):
            return None
        warm, self._warm, self._since = self._warm, True, totals
        return Split(since, 0.0).towers_ms if warm else None

    @property
    def _ratios(self):
        return uneven.simplest([each.ratio for each in self._towers])

    def _better(self, towers_ms):
        """Returns the ratios that promise enough, or else those that there are."""
        whole = sum(each.ratio for each in self._towers)
        most = [
            max(self._headroom(each), 1.0) * each.ratio / whole for each in self._towers
        ]
        return _worth_trying(towers_ms, self._ratios, most)

    def _wish(self, verb, ratios):
        why = f"--split_ratios=auto, which {verb} {_text(ratios)}"
        return Wish(why, _devices(self._towers), ratios, refused=self._refused)

    def _refused(self, reason):
        self._search = iter(())
        _say(f"Split ratios stay {_text(self._ratios)}: {reason}")

    def _keep(self, measured, best):
        """Writes down what was found, and says so."""
        times = ", ".join(f"{ms:.1f}" for ms in measured[best])
        verb = "stay" if best == next(iter(measured)) else "are"
        said = f"Split ratios {verb} {_text(best)}: towers take {times} ms of a step"
        if _worth_trying(measured[best], best) not in measured:
            said += "; a GPU lacks memory for more"
        try:
            remember(self._file, _devices(self._towers), best)
            _say(f"{said}. They are kept in {self._file}.")
        except OSError as error:
            _say(f"{said}. They cannot be kept: {error}.")


def _worth_trying(towers_ms, ratios, most=None):
    """Returns ratios with which a step would be clearly shorter, or else the same."""
    better = uneven.better_ratios(towers_ms, ratios, most)
    shorter = uneven.step_with(towers_ms, ratios, better) <= _WORTH
    return better if shorter else ratios


def _devices(towers):
    return [device for tower in towers for device in tower.devices]


def remember(file: str, devices: Sequence[str], split_ratios: Sequence[int]) -> None:
    """Writes down the split ratios that were found for devices.

    Raises:
        OSError: The file cannot be written.
    """
    found = remembered.read(file) | {" ".join(devices): [*split_ratios]}
    remembered.write(file, found)


def recall(file: str, devices: Sequence[str]) -> tuple[int, ...] | None:
    """Reads what `remember` wrote for these devices; `None` if there is nothing."""
    ratios = remembered.read(file).get(" ".join(devices))
    if not isinstance(ratios, list) or not ratios:
        return None
    if not all(type(each) is int and each > 0 for each in ratios):
        return None
    return tuple(ratios) if len(devices) % len(ratios) == 0 else None


def _headroom(tower: Tower) -> float:
    """How many times what it took most a tower's GPUs have, with some to spare."""
    found = math.inf
    limits = device_memory_limits()
    for device in filter(is_gpu, tower.devices):
        peak = tf.config.experimental.get_memory_info(device)["peak"]
        if peak and device in limits:
            found = min(found, _SAFE * limits[device] / peak)
    return found


def _text(ratios):
    return ":".join(map(str, ratios))


def _say(line):
    voice.end_progress_bar()
    voice.say(line)
