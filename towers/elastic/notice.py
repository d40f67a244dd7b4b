"""Notices that this machine is about to be taken away, and where they come from.

That is a file, a URL, or the metadata service of a cloud. Only Python's own library is
needed, so that flags can be checked before Keras is imported.
"""

import http.client
import ipaddress
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol
from urllib.parse import urlsplit

_TIMEOUT_S = 2.0
# Azure starts its service with the first call, which takes up to two minutes.
_FIRST_TIMEOUT_S = 150.0
_MOST_BYTES, _MOST_LETTERS = 2**16, 200
_NOT_TOLD = "at a time that is not told"


class Notice(NamedTuple):
    """What was noticed.

    Attributes:
        what: In a few words.
        when: When the machine goes, as in "at noon".
    """

    what: str
    when: str

    def line(self) -> str:
        """Returns it as a sentence, with what follows."""
        return (
            f"Preemption notice: {self.what}. The machine goes {self.when}; this "
            "process ends as by SIGTERM."
        )


class NoticeError(Exception):
    """Nobody can tell whether there is a notice."""


class _NoAnswerError(NoticeError):
    """There is no such server, or it says nothing."""


class NoticeSource(Protocol):
    """Where a notice comes from.

    Attributes:
        every_s: How many seconds to wait between two looks.
    """

    every_s: float

    def look(self) -> Notice | None:
        """Returns a notice, if there is one.

        Raises:
            NoticeError: It cannot be told.
        """


def check(where: str, name: str = "where") -> None:
    """Checks that notices may come from there.

    Args:
        where: The name of a cloud, a URL, or the path of a file.
        name: What to call it.

    Raises:
        ValueError: They cannot.
    """
    if where in CLOUDS:
        return
    listed = ", ".join(CLOUDS)
    expected = f"{listed}, a URL of http or https, or the path of a file"
    if "://" in where:
        if not _is_web(where):
            raise ValueError(f"Received {name}={where}; expected {expected}.")
        return
    path = os.path.abspath(os.path.expanduser(where))
    if not where or os.path.isdir(path):
        raise ValueError(f"Received {name}={where}; expected {expected}.")
    if not os.path.isdir(os.path.dirname(path)):
        raise ValueError(
            f"Received {name}={where}, but there is no folder {os.path.dirname(path)}; "
            f"expected {expected} in a folder that exists."
        )


def source(where: str, metadata_host: str | None = None) -> NoticeSource:
    """Returns where notices come from; see `check`.

    Args:
        where: The name of a cloud, a URL, or the path of a file.
        metadata_host: Host, and port, of the cloud's metadata service. By default that
            of the cloud.
    """
    if where in CLOUDS:
        return CLOUDS[where](*([metadata_host] if metadata_host else []))
    if "://" in where:
        return _Url(where)
    return _File(os.path.abspath(os.path.expanduser(where)))


def _is_web(url):
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    web = parts.scheme in ("http", "https") and parts.hostname
    return bool(web) and parts.username is None and url.isascii() and url.isprintable()


class _File:
    """A file that somebody writes; nothing is known of it before."""

    every_s = 1.0

    def __init__(self, path: str):
        self._path = path

    def look(self) -> Notice | None:
        """Looks whether it exists."""
        if not os.path.exists(self._path):
            return None
        text = ""
        try:
            if os.path.isfile(self._path):  # a pipe could keep us waiting
                with open(self._path, errors="replace") as file:
                    text = file.readline(_MOST_LETTERS)
        except OSError:
            pass  # it is there, and that is the notice
        return Notice(_with(f"the file {self._path} exists", text), _NOT_TOLD)


class _Url:
    """A server that answers 200 once the machine is to go."""

    every_s = 5.0

    def __init__(self, url: str):
        self._url, self._direct = url, _is_link_local(urlsplit(url).hostname)

    def look(self) -> Notice | None:
        """Asks it."""
        try:
            status, text = _ask(self._url, direct=self._direct)
        except _NoAnswerError:
            return None
        if status == 200:
            line = text.strip().partition("\n")[0]
            return Notice(_with(f"{self._url} answers 200", line), _NOT_TOLD)
        if status == 404:
            return None
        _fail_by_status(self._url, status)


class _Aws:
    """A spot instance of AWS, by version 2 of its metadata service."""

    every_s = 5.0

    def __init__(self, host: str = "169.254.169.254"):
        self._base, self._token = f"http://{host}/latest", None

    def look(self) -> Notice | None:
        """Asks for the action that is planned."""
        url = f"{self._base}/meta-data/spot/instance-action"
        for _ in range(2):  # with another token, if the one it has was too old
            if self._token is None:
                self._token = self._new_token()
            header = {"X-aws-ec2-metadata-token": self._token}
            status, text = _ask(url, header)
            if status != 401:
                break
            self._token = None
        if status == 404:
            return None
        if status != 200:
            _fail_by_status(url, status)
        found = _as_json(url, text)
        if found.get("action") not in ("terminate", "stop", "hibernate"):
            _fail_by_garbage(url)
        when = _plain(found.get("time"))
        what = f'AWS has planned "{found["action"]}" for this machine'
        return Notice(what, f"at {when}" if when else _NOT_TOLD)

    def _new_token(self):
        url = f"{self._base}/api/token"
        header = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        status, text = _ask(url, header, method="PUT")
        if status != 200:
            _fail_by_status(url, status)
        if not (token := text.strip()) or not (token.isascii() and token.isprintable()):
            _fail_by_garbage(url)
        return token


class _Gcp:
    """A machine of Google Cloud that may be preempted, or ended for maintenance."""

    every_s = 5.0

    def __init__(self, host: str = "metadata.google.internal"):
        self._base = f"http://{host}/computeMetadata/v1/instance"

    def look(self) -> Notice | None:
        """Asks for both."""
        if self._value("preempted", "FALSE", "TRUE") == "TRUE":
            what = "Google Cloud has preempted this machine"
            return Notice(what, "within about 30 s")
        ends = "TERMINATE_ON_HOST_MAINTENANCE"
        others = "NONE", "MIGRATE_ON_HOST_MAINTENANCE", "MIGRATE"
        if self._value("maintenance-event", *others, ends) == ends:
            what = "Google Cloud ends this machine for the maintenance of its host"
            return Notice(what, _NOT_TOLD)
        return None

    def _value(self, name, *known):
        url = f"{self._base}/{name}"
        status, text = _ask(url, {"Metadata-Flavor": "Google"})
        if status != 200:
            _fail_by_status(url, status)
        if text.strip() not in known:
            _fail_by_garbage(url)
        return text.strip()


class _Azure:
    """A machine of Azure, by its scheduled events, which tell of others as well."""

    every_s = 1.0

    def __init__(self, host: str = "169.254.169.254"):
        self._base, self._name = f"http://{host}/metadata", ""
        self._timeout_s = _FIRST_TIMEOUT_S

    def look(self) -> Notice | None:
        """Asks for events of this machine."""
        if not self._name:
            # The names of machines are the same in any case.
            self._name = self._own_name().casefold()
        url = f"{self._base}/scheduledevents?api-version=2020-07-01"
        status, text = _ask(url, {"Metadata": "true"}, timeout_s=self._timeout_s)
        self._timeout_s = _TIMEOUT_S
        if status != 200:
            _fail_by_status(url, status)
        try:
            for event in _as_json(url, text)["Events"]:
                names = [name.casefold() for name in event["Resources"]]
                kind = event["EventType"]
                ends = kind in ("Preempt", "Terminate", "Redeploy", "Reboot")
                if ends and self._name in names:
                    # It is empty once the event has begun.
                    when = _plain(event.get("NotBefore"))
                    what = f'Azure has planned "{kind}" for this machine'
                    return Notice(what, f"not before {when}" if when else "at once")
        except (AttributeError, KeyError, TypeError):
            _fail_by_garbage(url)
        return None

    def _own_name(self):
        url = f"{self._base}/instance/compute/name?api-version=2021-02-01&format=text"
        status, text = _ask(url, {"Metadata": "true"})
        if status != 200:
            _fail_by_status(url, status)
        if not text.strip():
            _fail_by_garbage(url)
        return text.strip()


CLOUDS: dict[str, Callable[..., NoticeSource]] = {
    "aws": _Aws,
    "gcp": _Gcp,
    "azure": _Azure,
}
"""The clouds, by their names."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Has an answer that leads elsewhere be an answer as others are."""

    def redirect_request(self, *args, **kwargs):
        return None


def _ask(
    url: str,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    timeout_s: float | None = None,
    direct: bool = True,
) -> tuple[int, str]:
    """Returns the status of an answer, and the beginning of its text."""
    handlers: list[Any] = [_NoRedirect]
    if direct:
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        asked = urllib.request.Request(url, headers=dict(headers or {}), method=method)
        opener = urllib.request.build_opener(*handlers)
        with opener.open(asked, timeout=timeout_s or _TIMEOUT_S) as answer:
            return answer.status, answer.read(_MOST_BYTES).decode(errors="replace")
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, ""
    except http.client.HTTPException as error:
        # Its text is what the server has sent.
        reason: Any = type(error).__name__
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
    raise _NoAnswerError(f"{url} does not answer ({reason})")


def _is_link_local(host):
    """Whether a host is one that no proxy reaches."""
    try:
        return ipaddress.ip_address(host).is_link_local
    except ValueError:
        return host == "metadata.google.internal"


def _as_json(url, text) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else _fail_by_garbage(url)


def _with(what, text):
    """Adds what somebody has written, if they have."""
    text = _plain(text)
    return f'{what} and says "{text}"' if text else what


def _plain(text):
    """Returns a text as a part of a line; "" for what is no text."""
    words = " ".join(text.split()) if isinstance(text, str) else ""
    return "".join(filter(str.isprintable, words))[:_MOST_LETTERS]


def _fail_by_status(url: str, status: int) -> NoReturn:
    raise NoticeError(f"{url} answers with status {status}")


def _fail_by_garbage(url: str) -> NoReturn:
    raise NoticeError(f"{url} answers what cannot be read")
