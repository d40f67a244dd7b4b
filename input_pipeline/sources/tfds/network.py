"""Notices early that there is no network, where a library would retry for long."""

import contextlib
import functools
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

from towers.keras_adapter.patching import Target, patched

# Long for a reachable host, short for a person who waits.
_SECONDS = 10


class Unreachable(OSError):
    """There is no connection to a host."""


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """A context in which requests to a host that does not answer fail at once.

    TFDS has ``requests`` try each file 11 times, with pauses of up to two minutes, and
    without a limit for an answer. Here, each host is first asked for a connection;
    later failures are still tried again.

    Raises:
        Unreachable: replaces an error of ``requests``.
    """
    import requests

    hosts = _Hosts()

    def ask_and_send(send, adapter, request, *args, **kwargs):
        url = request.url
        proxies = kwargs.get("proxies") or {}
        reason = hosts.ask(requests.utils.select_proxy(url, proxies) or url)
        if reason:
            raise Unreachable(reason)
        return send(adapter, request, *args, **kwargs)

    # TFDS downloads in its own threads.
    with patched(_send(), ask_and_send, all_threads=True):
        yield


@functools.cache
def _send() -> Target:
    import requests

    return Target(requests.adapters.HTTPAdapter, "send")


class _Hosts:
    """The answers of hosts that were asked."""

    def __init__(self):
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, int], _Answer] = {}

    def ask(self, url: str) -> str:
        """Returns why the host of a URL cannot be reached; empty if it can."""
        parts = urlsplit(url)
        port = parts.port or (80 if parts.scheme == "http" else 443)
        place = parts.hostname or "", port
        with self._lock:
            if place not in self._answers:
                self._answers[place] = _Answer(place)
            answer = self._answers[place]
        return answer.wait()


class _Answer:
    """Asks a host for a connection, in a thread, as looking up a name has no limit."""

    def __init__(self, place: tuple[str, int]):
        self._place = place
        self._reason = f"no answer within {_SECONDS} s"
        self._asking = threading.Thread(target=self._ask, daemon=True)
        self._asking.start()

    def wait(self) -> str:
        self._asking.join(_SECONDS)
        if not self._reason:
            return ""
        host, port = self._place
        return f"no connection to {host}:{port} ({self._reason})"

    def _ask(self) -> None:
        try:
            socket.create_connection(self._place, _SECONDS).close()
        except OSError as error:
            self._reason = error.strerror or str(error)
        else:
            self._reason = ""
