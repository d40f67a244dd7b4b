"""Other towers that somebody asks for, by `towers resize`."""

from towers.devices import Devices
from towers.elastic.requests import Inbox, Request
from towers.elastic.wish import Wish
from towers.program import words


class Asked:
    """What is asked for in a model_dir, as a source of `Resize`."""

    def __init__(self, model_dir: str, devices: Devices, shared: bool = False):
        """Forgets what was asked of an earlier run.

        Args:
            model_dir: The folder of the run.
            devices: All devices that are set up.
            shared: Whether the run shares them with others, which decides alone.
        """
        self._shared = shared
        self._devices, self._inbox = devices, Inbox(model_dir)
        self._inbox.clear()
        self._request: Request | None = None

    def look(self) -> Wish | None:
        """Returns a wish that has come; `None` if none has.

        Raises:
            ValueError: It is for devices that are not set up.
        """
        self._request = self._inbox.take()
        if self._request is None:
            return None
        if self._shared:
            raise ValueError(
                "Received a request for a run with --share_gpus, which gets what other "
                "runs leave; start it without to decide on its GPUs."
            )
        ratios = self._request.split_ratios or None
        return Wish("towers resize", self._chosen(self._request), ratios)

    def applied(self) -> None:
        """Is told that the wish is in place; `done` follows."""

    def refused(self, reason: str) -> None:
        """Is told why the wish cannot be."""
        self._inbox.answer(self._request, refused=reason)

    def done(self, line: str) -> None:
        """Is told, in a line, what has become of the wish."""
        self._inbox.answer(self._request, done=line)

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
