"""The nodes of Ray's cluster as places for hosts that come and go.

A host is an actor that Ray places where there is room. One that waits for a place asks
Ray's autoscaler for another node.
"""

import contextlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Mapping

import ray

from towers.cluster import addresses
from towers.launch.arguments import LaunchOptions
from towers.launch.generation import USAGE
from towers.launch.machine import say
from towers.launch.on_ray import cluster
from towers.launch.on_ray.actor import HostActor
from towers.program import words


class ActorHost:
    """A host on one of Ray's nodes, as `Launcher` knows hosts.

    Attributes:
        rank: Its number among the hosts.
        pid: Its process, on its node; 0 as long as it waits for a place.
        code: Its exit code, negative for a signal; `None` while it runs.
        how: How it has ended, in words.
        log: Its file; Ray keeps what it writes.
        is_lost: Whether Ray has lost its node, so that it is not to blame.
        is_stopped: Whether it stands still, which Ray does not tell.
    """

    log = None
    is_stopped = False

    def __init__(
        self,
        rank: int,
        actor: ray.actor.ActorHandle,
        args: tuple,
        ended: Callable[["ActorHost"], None],
        placed: Callable[["ActorHost"], None],
    ):
        """Has it started, in another thread: it may have to wait.

        Args:
            rank: See above.
            actor: What is to start it.
            args: Of `HostActor.start`.
            ended: Is called in that thread once it has ended.
            placed: Is called in that thread once it has found a place.
        """
        self.rank, self.pid, self.code, self.how = rank, 0, None, ""
        self.is_lost, self._actor, self._given_up = False, actor, 0
        self._node: str | None = None
        self._ended, self._placed = ended, placed
        threading.Thread(target=self._run, args=args, daemon=True).start()

    @property
    def exit_code(self) -> int | None:
        """Its exit code as a shell has it: 128 and more for a signal."""
        return self.code if self.code is None or self.code >= 0 else 128 - self.code

    def signal(self, number: int) -> None:
        """Sends it a signal; one that asks for the end has it wait no more."""
        if self.code is not None:
            return
        if self.pid:
            self._actor.signal.remote(int(number))
        elif number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            self._given_up = int(number)
            ray.kill(self._actor)

    def all_is_shown(self, seconds: float) -> None:
        """Does nothing: Ray shows what it writes."""

    def _run(self, *args):
        code, how = 1, ""
        try:
            self.pid, self._node = ray.get(self._actor.start.remote(*args))
            self._placed(self)
            code, how = ray.get(self._actor.wait.remote())
        except ray.exceptions.RayTaskError as error:
            how = cluster.first_line(error.cause)
            if isinstance(error.cause, ValueError):
                code = USAGE  # it cannot be started
        except ray.exceptions.RayError as error:
            if self._given_up:
                code, how = -self._given_up, signal.Signals(self._given_up).name
            else:
                how = self._lost(error)
        self.how, self.code = how, code
        # The launcher hears of it before another one gets the place.
        self._ended(self)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)

    def _lost(self, error):
        """Finds whether its node is to blame, and says what Ray has lost."""
        if self._node is None:
            return f"Ray cannot start it ({cluster.first_line(error)})"
        is_there = not isinstance(error, ray.exceptions.ActorUnavailableError)
        self.is_lost = not (is_there and cluster.has(self._node))
        if self.is_lost:
            return "Ray has lost its node"
        return f"Ray has lost it ({cluster.first_line(error)})"


class Nodes:
    """The nodes, as `Machine` is this machine.

    Attributes:
        token: What all hosts know and strangers do not.
        listens_at: Where the coordinator listens.
        places_later: Whether a host may have to wait for a place.
    """

    places_later = True

    def __init__(self, options: LaunchOptions, are_here: bool):
        """Takes over what is asked for; Ray is connected.

        Args:
            options: What is asked for.
            are_here: Whether no node is on another machine.

        Raises:
            ValueError: The interface is none of this machine's.
        """
        self.token = secrets.token_hex(16)
        here = "127.0.0.1" if are_here else cluster.address()
        if options.interface is not None:
            here = addresses.of_interface(options.interface)
        self.listens_at = addresses.joined(here, 0)
        self._options, self._resources = options, cluster.resources(options)
        self._folder: str | None = os.getcwd()
        if ray.get_runtime_context().runtime_env.get("working_dir"):
            self._folder = None  # Ray has copied it, and actors begin there

    def start(
        self,
        number: int,
        place: Mapping[str, str],
        ended: Callable[[ActorHost], None],
        placed: Callable[[ActorHost], None],
    ) -> ActorHost:
        """Starts a host once there is a place; see `Machine.start`."""
        options, first = self._options, self._options.command[0]
        actor = HostActor.options(
            num_cpus=self._resources["CPU"],
            num_gpus=self._resources.get("GPU", 0),
            scheduling_strategy="SPREAD" if _spreads(options) else "DEFAULT",
        ).remote()
        python = "python" if first == sys.executable else first
        args = number, (python, *options.command[1:]), self._folder, dict(place)
        return ActorHost(number, actor, args, ended, placed)

    def say_where(self, count: int) -> None:
        """Says how many hosts are asked for, and what for each."""
        hosts, each = words.count(count, "host"), cluster.in_words(self._resources)
        say(
            f"Asking Ray for {hosts} with {each} each; its cluster has "
            f"{cluster.in_words(ray.cluster_resources())}."
        )


def _spreads(options):
    return options.placement_strategy == "SPREAD"
