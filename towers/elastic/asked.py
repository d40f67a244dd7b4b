"""Other towers that somebody asks for, by `towers resize`."""

import os

from towers.devices.configuration import Devices
from towers.elastic.requests import Inbox, Request
from towers.elastic.wish import Wish
from towers.hosts import group
from towers.program import words

# A request that comes between two calls of `fit` is for the second one.
_cleared: set[str] = set()


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
        if group.member() is not None:
            raise ValueError(
                "Received a request for a run whose hosts come and go; expected other "
                "hosts instead, by the --host_file of towers launch."
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
