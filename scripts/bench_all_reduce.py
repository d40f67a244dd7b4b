"""Times the sum over hosts, against others' and against a model of it.

    python -m scripts.bench_all_reduce --hosts=2 --reducers=towers,multi_worker,gloo
    python -m scripts.bench_all_reduce --hosts=2,4,8 --mbit=100 --delay_ms=1 --predict

Each host is a process. They are on loopback, or with --mbit or --delay_ms each in a
network namespace of its own, behind a switch that is a process of ours. In each round,
every reducer sums arrays of all sizes in turn. Nothing else may run meanwhile.

Reducers (--reducers):

    towers          ours, by TensorFlow; towers:fp16 and towers:bf16 round what travels
    mpi             ours, by MPI (needs mpi4py and mpirun); mpi:fp16 and mpi:bf16, too
    multi_worker    MultiWorkerMirroredStrategy's all_reduce of TensorFlow's tensors
    gloo            PyTorch's (needs torch)

With --predict, another column has what the model of docs/scale/scaling.md says of the
first reducer. It knows two numbers: what the smallest and the largest array take on the
first number of hosts.

"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from absl import app, flags

from scripts.bench import mpirun
from scripts.race import alternate
from tests import network
from towers.hosts import group
from towers.scaling.network import sum_s

FLAGS = flags.FLAGS
flags.DEFINE_list("hosts", ["2"], "Numbers of hosts.")
flags.DEFINE_list("reducers", ["towers"], "Who sums; see above.")
flags.DEFINE_list("bytes", ["16", "1e6", "1e8"], "Sizes of arrays of float32.")
flags.DEFINE_integer("rounds", 5, "Rounds.", lower_bound=1)
flags.DEFINE_bool("predict", False, "Whether to say what the model says; see above.")
flags.DEFINE_float("mbit", None, "Rate of each host's cable, in Mbit/s.")
flags.DEFINE_float("delay_ms", 0.0, "Delay from one host to another.")

# In a round, so many sums of each size; of large ones fewer.
_SUMS, _ROUND_BYTES = 50, 2e8


def towers(rank: int, addresses: list[str], wire: str | None) -> Callable:
    """Connects a host; returns what sums so many numbers."""
    from towers.cluster import process_group

    names = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(group.Membership(rank, tuple(addresses), names))
    return _adding(wire)


def mpi(rank: int, addresses: list[str], wire: str | None) -> Callable:
    """Connects a process that mpirun has started."""
    group.join_as_started("auto")
    return _adding(wire)


def _adding(wire):
    """Returns what sums so many numbers over the hosts that have joined."""
    import tensorflow as tf

    hosts = group.world().compressing(wire or "none")

    @tf.function
    def step(array):
        (total,) = hosts.all_reduce([array], "sum", compressible=[array])
        return total

    arrays = {}

    def add(count):
        array = arrays.setdefault(count, tf.ones(count))
        assert step(array)[-1].numpy() == hosts.count

    return add


def multi_worker(rank: int, addresses: list[str], _: None) -> Callable:
    """The same by TensorFlow."""
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": addresses}, "task": task}
    )
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def replica(array):
        # Computed here, so that it is on the replica's device.
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.identity(array))

    step = tf.function(lambda array: strategy.run(replica, (array,)))
    arrays = {}

    def add(count):
        array = arrays.setdefault(count, tf.ones(count))
        assert step(array)[-1].numpy() == len(addresses)

    return add


def gloo(rank: int, addresses: list[str], _: None) -> Callable:
    """The same by PyTorch."""
    import torch

    host, port = addresses[0].split(":")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if host == "127.0.0.1" else "eth0"
    torch.distributed.init_process_group(
        "gloo", f"tcp://{host}:{port}", rank=rank, world_size=len(addresses)
    )
    arrays = {}

    def add(count):
        array = arrays.setdefault(count, torch.ones(count))
        array.fill_(1)
        torch.distributed.all_reduce(array)
        assert array[-1] == len(addresses)

    return add


REDUCERS = {each.__name__: each for each in (towers, mpi, multi_worker, gloo)}


def work(reducer: str, rank: str, *addresses: str) -> None:
    """Is a host: for each line of count and times, it sums so often."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    name, _, way = reducer.partition(":")
    # What others print is none of the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    add = REDUCERS[name](int(rank), [*addresses], way or None)
    is_first = name != "mpi" or group.joined().rank == 0
    if is_first:
        print("ready", file=answers, flush=True)
    for line in _lines_of_first(is_first) if name == "mpi" else sys.stdin:
        count, times = map(int, line.split())
        seconds = []
        for _ in range(times):
            begun_s = time.perf_counter()
            add(count)
            seconds.append(time.perf_counter() - begun_s)
        if is_first:
            print(json.dumps(seconds), file=answers, flush=True)


def _lines_of_first(is_first):
    """Yields the lines that mpirun gives to the first process alone."""
    while True:
        line = sys.stdin.readline() if is_first else None
        if not (line := group.world().broadcast_value(line)):
            return
        yield line


class Hosts:
    """The processes of a reducer."""

    def __init__(self, reducer: str, count: int, joined: network.Network | None):
        """Starts them, and waits until they are connected."""
        if joined is None:
            with contextlib.ExitStack() as held:
                opened = [
                    held.enter_context(socket.create_server(("127.0.0.1", 0)))
                    for _ in range(count)
                ]
                found = [f"127.0.0.1:{each.getsockname()[1]}" for each in opened]
        else:
            # Reducers are there side by side.
            port = 20_000 + 10 * FLAGS.reducers.index(reducer)
            found = [f"{address}:{port}" for address in joined.addresses]
        command = [sys.executable, "-m", __spec__.name, "host", reducer]
        start = subprocess.Popen
        self._processes = []
        if reducer.partition(":")[0] == "mpi":
            command = [mpirun.MPIRUN, "-n", str(count), *command]
            count = 1
        for rank in range(count):
            if joined is not None:
                start = lambda *of, rank=rank, **options: joined.start(  # noqa: E731
                    rank, *of, **options
                )
            self._processes.append(
                start(
                    [*command, str(rank), *found],
                    env=os.environ | mpirun.ALLOWED,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for each in self._processes:
            assert each.stdout.readline() == "ready\n", f"{reducer} has ended"

    def sum(self, count: int, times: int) -> list[float]:
        """Returns seconds of each sum, on the first host."""
        for each in self._processes:
            print(count, times, file=each.stdin, flush=True)
        answers = [json.loads(each.stdout.readline()) for each in self._processes]
        return answers[0]

    def end(self) -> None:
        """Ends them."""
        for each in self._processes:
            each.kill()
            each.wait()


def race(count: int) -> list[tuple[int, dict[str, float]]]:
    """Returns for each size the median milliseconds of each reducer."""
    with contextlib.ExitStack() as stack:
        joined = None
        if FLAGS.mbit or FLAGS.delay_ms:
            joined = network.Network(count, FLAGS.mbit or 10_000, FLAGS.delay_ms)
            stack.enter_context(joined)
        running = {each: Hosts(each, count, joined) for each in FLAGS.reducers}
        for each in running.values():
            stack.callback(each.end)
        sizes = [int(float(each)) for each in FLAGS.bytes]
        return [(size, _medians_ms(running, size)) for size in sizes]


def _medians_ms(running, size):
    times = int(max(2, min(_SUMS, _ROUND_BYTES / size)))
    rounds = alternate(
        lambda name: running[name].sum(size // 4, times), running, FLAGS.rounds + 1
    )
    return {
        # The first warms up.
        name: 1000 * statistics.median(map(statistics.median, some[1:]))
        for name, some in rounds.items()
    }


def main(_: list[str]) -> None:
    """Prints a table."""
    columns = [*FLAGS.reducers, *(["predicted"] if FLAGS.predict else [])]
    print(f"| hosts | bytes | {' | '.join(f'{each}, ms' for each in columns)} |")
    print("|" + "---|" * (2 + len(columns)))
    known = None
    for count in map(int, FLAGS.hosts):
        found = race(count)
        known = known or _fitted(count, *found[0], *found[-1])
        for size, medians in found:
            milliseconds = [*medians.values()]
            if FLAGS.predict:
                milliseconds.append(1000 * sum_s(count, size, *known))
            listed = " | ".join(f"{each:,.2f}" for each in milliseconds)
            print(f"| {count} | {size:,} | {listed} |", flush=True)


def _fitted(count, small, of_small, large, of_large):
    """The seconds of a message and of a byte that explain two measured sums."""
    name = FLAGS.reducers[0]
    measured = [of_small[name] / 1000, of_large[name] / 1000]
    rows = [
        [sum_s(count, size, *unit) for unit in ((1, 0), (0, 1))]
        for size in (small, large)
    ]
    (a, b), (c, d) = rows
    determinant = a * d - b * c
    return (
        (measured[0] * d - measured[1] * b) / determinant,
        (measured[1] * a - measured[0] * c) / determinant,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["host"]:
        work(*sys.argv[2:])
    else:
        app.run(main)
