"""An object store on this machine, with a latency and a bandwidth of one's choice.

It answers as Google Cloud Storage does, as far as TensorFlow asks, so `gs://` is read
by the code that reads the real one. TensorFlow reaches it as a proxy, which every
request goes through, and trusts its certificate.

    python -m tests.object_store ROOT KEYS LATENCY_MS MB_PER_S

serves the folders in ROOT as buckets, and prints its port. A request takes the latency;
all answers share the bandwidth, which is endless if it is 0.
"""

import contextlib
import datetime
import http.server
import json
import os
import pathlib
import shutil
import socketserver
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
HOSTS = "storage.googleapis.com", "www.googleapis.com"
_PIECE = 2**16


class Server(NamedTuple):
    """A server that runs.

    Attributes:
        environ: what a process needs to read from it; before it imports TensorFlow.
        url: where it tells its figures.
    """

    environ: Mapping[str, str]
    url: str

    def figures(self) -> dict:
        """Returns the number of requests, the bytes, and what was read, in order."""
        with urllib.request.urlopen(f"{self.url}/figures") as answer:
            return json.load(answer)


def is_possible() -> bool:
    """Tells whether certificates can be made."""
    return shutil.which("openssl") is not None


@contextlib.contextmanager
def serve(
    root: str | os.PathLike,
    keys: str | os.PathLike,
    latency_ms: float = 0,
    mb_per_s: float = 0,
) -> Iterator[Server]:
    """Serves the folders in `root` as buckets; certificates are made in `keys`."""
    make_keys(pathlib.Path(keys))
    command = [sys.executable, "-m", "tests.object_store", str(root), str(keys)]
    command += [str(latency_ms), str(mb_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            yield Server(environ(url, keys), url)
        finally:
            process.kill()


def environ(url: str, keys: str | os.PathLike) -> dict[str, str]:
    """What sends TensorFlow's requests to the server."""
    return {
        "https_proxy": url,
        "CURL_CA_BUNDLE": os.path.join(keys, "ca.pem"),
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody",
        "NO_GCE_CHECK": "true",
    }


def make_keys(folder: pathlib.Path) -> None:
    """Makes an authority, and a certificate of Google's names by it."""
    folder.mkdir(exist_ok=True)
    names = ",".join(f"DNS:{host}" for host in HOSTS)
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for command in (
        ["req", "-x509", *key, "-days", "9", "-subj", "/CN=Towers", "-keyout", "ca.key"]
        + ["-out", "ca.pem", "-addext", "basicConstraints=critical,CA:TRUE"],
        ["req", "-x509", *key, "-days", "9", "-subj", f"/CN={HOSTS[0]}"]
        + ["-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", "key.pem"]
        + ["-out", "cert.pem", "-addext", f"subjectAltName={names}"]
        + ["-addext", "basicConstraints=critical,CA:FALSE"],
    ):
        subprocess.run(
            ["openssl", *command], cwd=folder, check=True, capture_output=True
        )


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 2**16

    def do_CONNECT(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.flush()
        self.connection = self.server.keys.wrap_socket(self.connection, True)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", 2**16)

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        if url.path == "/figures":
            with self.server.lock:
                return self._say(self.server.figures)
        time.sleep(self.server.latency_s)
        with self.server.lock:
            self.server.figures["requests"] += 1
        path = urllib.parse.unquote(url.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if not path.startswith("/storage/v1/b/"):
            return self._send_object(path.strip("/"))
        bucket, _, name = path.removeprefix("/storage/v1/b/").partition("/o")
        if not name and self.path.partition("?")[0].endswith("/o"):
            return self._list(bucket, query)
        return self._describe(bucket, name.removeprefix("/"))

    def _describe(self, bucket, name):
        file = self.server.root / bucket / name
        if file.is_dir() if name else not file.is_dir():
            return self.send_error(404)
        if name and not file.is_file():
            return self.send_error(404)
        stat = file.stat()
        changed = datetime.datetime.fromtimestamp(stat.st_mtime, datetime.UTC)
        return self._say(
            {
                "size": str(stat.st_size),
                "generation": str(stat.st_mtime_ns),
                "updated": changed.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            }
        )

    def _list(self, bucket, query):
        root = self.server.root / bucket
        prefix, most = query.get("prefix", ""), int(query.get("maxResults", 10**9))
        items, prefixes = [], set()
        for file in sorted(root.rglob("*")):
            name = str(file.relative_to(root))
            if not file.is_file() or not name.startswith(prefix):
                continue
            head, deeper, _ = name.removeprefix(prefix).partition("/")
            if deeper and "delimiter" in query:
                prefixes.add(f"{prefix}{head}/")
            else:
                items.append({"name": name})
        return self._say({"items": items[:most], "prefixes": sorted(prefixes)})

    def _send_object(self, name):
        file = self.server.root / name
        if not file.is_file():
            return self.send_error(404)
        size = file.stat().st_size
        begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
        begin, end = int(begin), min(int(end) + 1, size)
        if begin >= size:
            return self.send_error(416)
        with self.server.lock:
            self.server.figures["bytes"] += end - begin
            self.server.figures["read"].append((name, begin))
        self.send_response(206)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        with file.open("rb") as data:
            data.seek(begin)
            for at in range(begin, end, _PIECE):
                piece = data.read(min(_PIECE, end - at))
                self.server.wait_for(len(piece))
                self.wfile.write(piece)
        self.wfile.flush()

    def _say(self, answer):
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_):
        pass


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads, request_queue_size = True, 128

    def __init__(self, root, keys, latency_ms, mb_per_s):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.latency_s = pathlib.Path(root), latency_ms / 1000
        self.keys = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.keys.load_cert_chain(f"{keys}/cert.pem", f"{keys}/key.pem")
        self.lock = threading.Lock()
        self.figures = {"requests": 0, "bytes": 0, "read": []}
        self._bytes_per_s, self._free_s = mb_per_s * 2**20, 0.0

    def wait_for(self, size):
        """Waits until so many bytes may have come through the common line."""
        if self._bytes_per_s:
            with self.lock:
                now = time.monotonic()
                self._free_s = max(self._free_s, now) + size / self._bytes_per_s
                wait_s = self._free_s - now
            time.sleep(wait_s)

    def handle_error(self, *_):
        pass  # whoever asked has gone


def main() -> None:
    """Serves until it is killed."""
    root, keys, latency_ms, mb_per_s = sys.argv[1:]
    server = _Server(root, keys, float(latency_ms), float(mb_per_s))
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
