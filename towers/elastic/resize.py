"""Changes the towers of a run between two calls of training, and tells."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from towers.collectives.joined_hosts import this_host
from towers.devices.configuration import Devices
from towers.devices.names import HOST
from towers.devices.resolved import resolve
from towers.elastic import requests
from towers.elastic.generations import Generation, Generations, Wish, WishSource
from towers.elastic.requests import Inbox, Request
from towers.layers.variables import steps_done
from towers.model import fit_call
from towers.model.fit_call import FitCall
from towers.monitoring.bottleneck import uneven
from towers.program import voice, words
from towers.program.features import feature

# To look for a file takes microseconds, but milliseconds on a file system far away.
_LOOK_EVERY_S = 0.2
# A request that comes between two calls of `fit` is for the second one.
_cleared: set[str] = set()


@fit_call.changes_no_variable
class Resize(keras.callbacks.Callback):
    """Changes the towers of a run that trains, as `towers resize` asks for it.

    It does so between two calls of training. Batches and numbers stay the same; see
    `TowerModel.resize`. A line tells of each change once its first step is done.

    Attributes:
        generations: The towers that the run has had.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        available: Devices | None = None,
        shares: WishSource | None = None,
        check: Callable[[int, Sequence[int] | None], None] | None = None,
        on_change: Callable[[], None] | None = None,
        generations: Generations | None = None,
        balance: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Changes nothing yet.

        Args:
            directory: Folder that `towers resize` is given: the `model_dir` of the run.
            available: All devices that are set up. By default all GPUs that TensorFlow
                has, or else all logical CPUs.
            shares: What the run has among devices that runs share, if it does: that
                alone decides, and nobody can ask.
            check: Is called before a change with the number of devices and the split
                ratios; it raises a ValueError if they cannot be.
            on_change: Is called as training begins and after a change, before the
                next step.
            generations: Where to note the towers that the run has had.
            balance: Whether to find split ratios with which all towers take about as
                long, and keep them in `split_ratios.json` of the folder; on one host.
            clock: Returns seconds.
        """
        super().__init__()
        self._directory = os.path.abspath(os.path.expanduser(directory))
        self._available, self._shares = available, shares
        self._check, self._on_change, self._clock = check, on_change, clock
        self.generations = Generations() if generations is None else generations
        self._balance = balance
        self._sources: Sequence[WishSource] = ()
        self._changing: tuple[Wish, Generation] | None = None
        self._looked_s: float | None = None
        # When the last step ended.
        self._ended_s: float | None = None

    @contextlib.contextmanager
    def around_fit(self, call: FitCall) -> Iterator[None]:
        """Has nobody wait for an answer that will not come."""
        os.makedirs(self._directory, exist_ok=True)
        every = self._available
        if every is None:
            every = Devices(resolve(None), HOST)
        asked = None
        if this_host().index == 0:
            shared = self._shares is not None
            asked = Asked(self._directory, every, shared=shared)
        balance = None
        if self._balance:
            file = os.path.join(self._directory, requests.RATIOS)
            balance = feature("elastic.balance").Balance(call.model, file)
        sources = asked, self._shares, balance
        self._sources = [each for each in sources if each is not None]
        listens = requests.answering(self._directory)
        try:
            with listens if asked is not None else contextlib.nullcontext():
                yield
        finally:
            if self._changing is not None:
                self._changing[0].done("The run has ended, with no step more.")
            self._sources, self._changing = (), None

    def on_train_begin(self, logs=None):
        """Notes the first towers."""
        if self._on_change is not None:
            self._on_change()
        if not self.generations.every:
            why = "restart" if steps_done(self.model) else "start"
            self.generations.begin(self._generation(why))

    def on_train_batch_begin(self, batch, logs=None):
        """Looks for wishes."""
        now_s = self._clock()
        if self._looked_s is not None and now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        for source in self._sources:
            # One change after another, each with a step of its own.
            if self._changing is None and (wish := source.look()) is not None:
                try:
                    self._change(wish)
                except ValueError as error:
                    wish.refused(str(error))

    def _change(self, wish):
        # Builders also change while ways to update the variables race.
        before = self.model.builder.plan.replicas
        if self._check is not None:
            self._check(len(wish.gpus), wish.split_ratios)
        self.model.resize(gpus=wish.gpus, split_ratios=wish.split_ratios)
        wish.applied()
        if self.model.builder.plan.replicas == before:
            return wish.done("Nothing to change: the run has these towers already.")
        if self._on_change is not None:
            self._on_change()
        self._changing = wish, self._generation(wish.why)

    def on_train_batch_end(self, batch, logs=None):
        """Tells of a change, once its first step is done."""
        now_s = self._clock()
        if self._changing is not None:
            (wish, generation), self._changing = self._changing, None
            since_s = self._looked_s if self._ended_s is None else self._ended_s
            generation = dataclasses.replace(generation, seconds=now_s - since_s)
            line = self.generations.begin(generation)
            if line is not None:
                self.generations.marks.append(line)
                voice.end_progress_bar()
                voice.say(line)
            wish.done(line)
        self._ended_s = now_s

    def on_epoch_end(self, epoch, logs=None):
        """Counts no time between epochs."""
        self._ended_s = None

    def _generation(self, why):
        plan = self.model.builder.plan
        towers = [" and ".join(each.devices) for each in plan.replicas]
        if plan.hosts.count > 1:
            by_host = enumerate(plan.replicas_by_host)
            towers = [f"host {k} tower {i}" for k, n in by_host for i in range(n)]
            return Generation(steps_done(self.model), towers, why)
        ratios = uneven.simplest([each.ratio for each in plan.replicas])
        return Generation(steps_done(self.model), towers, why, split_ratios=[*ratios])

    def marks(self) -> list[str]:
        """Returns what has changed since the last call, in sentences."""
        marks = [*self.generations.marks]
        self.generations.marks.clear()
        return marks

    def measured(self) -> dict[str, float]:
        """Returns the number of towers, for TensorBoard."""
        return {"towers": len(self.model.builder.plan.replicas)}

    def state_dict(self) -> dict[str, Any]:
        """Returns what another run that goes on is to know."""
        return {"generations": self.generations.as_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts what an earlier run has known before what this one does."""
        self.generations.recall(state["generations"])


# Other towers that somebody asks for, by `towers resize`.


class Asked:
    """What is asked for in a model_dir, as a source of `Resize`."""

    def __init__(self, model_dir: str, devices: Devices, shared: bool = False):
        """Forgets what was asked of an earlier process.

        Args:
            model_dir: The folder of the run.
            devices: All devices that are set up.
            shared: Whether the run shares them with others, which decides alone.
        """
        self._shared = shared
        self._devices, self._inbox = devices, Inbox(model_dir)
        path = os.path.realpath(model_dir)
        if path not in _cleared:
            self._inbox.clear()
            _cleared.add(path)

    def look(self) -> Wish | None:
        """Returns a wish that has come; `None` if none has, or it was refused."""
        if (request := self._inbox.take()) is None:
            return None
        try:
            return Wish(
                *("towers resize", self._wished(request)),
                request.split_ratios or None,
                done=lambda line: self._inbox.answer(request, done=line),
                refused=lambda reason: self._inbox.answer(request, refused=reason),
            )
        except ValueError as error:
            self._inbox.answer(request, refused=str(error))
            return None

    def _wished(self, request: Request) -> list[str]:
        if self._shared:
            raise ValueError(
                "Received a request for a run with --share_gpus, which gets what other "
                "runs leave; start it without to decide on its GPUs."
            )
        return self._chosen(request)

    def _chosen(self, request):
        every = self._devices
        gpus = every.physical or range(len(every.towers))
        # Those of a GPU that is split belong together.
        by_gpu: dict[int, list[str]] = {}
        for device, gpu in zip(every.towers, gpus, strict=True):
            by_gpu.setdefault(gpu, []).append(device)
        kind = "GPU" if every.physical else "logical CPU"
        if request.num_gpus is not None and request.num_gpus > len(by_gpu):
            raise ValueError(
                f"Received --num_gpus={request.num_gpus}, but this run has set up "
                f"{words.count(len(by_gpu), kind)}; start it with "
                f"--max_gpus={request.num_gpus} to go on with as many."
            )
        asked = request.gpu_indices or [*by_gpu][: request.num_gpus]
        if absent := [gpu for gpu in asked if gpu not in by_gpu]:
            listed = ", ".join(map(str, by_gpu))
            raise ValueError(
                f"Received --gpu_indices with {absent[0]}, but this run has set up the "
                f"{kind}s {listed}; choose from these."
            )
        return [device for gpu in asked for device in by_gpu[gpu]]
