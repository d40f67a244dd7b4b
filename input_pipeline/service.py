"""Runs a dispatcher or a worker of a tf.data service.

    python -m towers.input_pipeline.service dispatcher --port=5050
    python -m towers.input_pipeline.service worker --dispatcher=localhost:5050

Start one dispatcher, and as many workers as you need, on machines that see the same
files. Training finds them by --data_service=grpc://localhost:5050. The service has no
passwords: anyone who reaches its ports can run graphs there. Keep the ports inside your
own network. Ctrl-C or SIGTERM ends a dispatcher or a worker.
"""

import dataclasses
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from towers.processes import signals
from towers.program import startup, voice
from towers.program.commands import fail
from towers.program.flags import command_line
from towers.program.flags.table import argument, flag

_PROGRAM = "towers.input_pipeline.service"

_ROLES = ("dispatcher", "worker")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """The arguments and flags of towers.input_pipeline.service."""

    role: str = argument("What to run: dispatcher or worker.")
    port: int = flag(
        0,
        "Flags",
        "Port to listen on. 0 takes any free port.",
        at_least=0,
        at_most=65535,
    )
    dispatcher: str | None = flag(
        None,
        "Flags",
        "Address of the dispatcher that a worker belongs to, such as node1:5050.",
    )
    address: str = flag(
        "localhost",
        "Flags",
        "Name under which other machines reach the machine of a worker.",
    )


def main() -> int:
    """Runs a dispatcher or a worker.

    Returns:
        The exit code.
    """
    # A service has no use for GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options = startup.begin(_PROGRAM, read)
    from tensorflow.data.experimental import service

    # Servers run in their own threads; the main thread waits for a signal. Other
    # threads run already, and one of them may receive the signal.
    ended = threading.Event()
    signals.listen((signal.SIGINT, signal.SIGTERM), lambda number: ended.set())
    startup.end()
    if options.role == "dispatcher":
        try:
            server = service.DispatchServer(service.DispatcherConfig(port=options.port))
        except Exception as error:  # TensorFlow's own kinds
            return fail(f"cannot listen on port {options.port}: {error}", _PROGRAM)
        print(f"dispatcher at {server.target}", flush=True)
    else:
        config = service.WorkerConfig(
            options.dispatcher,
            worker_address=f"{options.address}:%port%",
            port=options.port,
            dispatcher_timeout_ms=10_000,
        )
        host, _, port = options.dispatcher.partition(":")
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
            server = service.WorkerServer(config)
        except Exception as error:  # TensorFlow's own kinds, too
            return fail(
                f"no dispatcher answers at {options.dispatcher}: {error}", _PROGRAM
            )
        print(f"worker of {options.dispatcher}", flush=True)
    # Neither of TensorFlow's configurations has an address to listen on.
    voice.say(
        f"The {options.role} listens on all addresses of this machine, as TensorFlow "
        "binds it to none, and asks for no password: who reaches it can run graphs "
        "here. Have a firewall let in your own machines only."
    )
    ended.wait()
    # To end in order, a server would wait for clients that may have gone.
    sys.stdout.flush()
    os._exit(0)


def read(argv: Sequence[str]) -> ServiceOptions:
    """Reads the command line, and checks it.

    Raises:
        ValueError: The role or a flag is wrong.
    """
    options = command_line.read(ServiceOptions, argv, __doc__)
    if options.role not in _ROLES:
        raise ValueError(f"Received {options.role}; expected dispatcher or worker.")
    if (options.role == "worker") != (options.dispatcher is not None):
        raise ValueError(
            f"Received --dispatcher={options.dispatcher} for a {options.role}; "
            "expected it for a worker, and for nothing else."
        )
    if options.dispatcher and not re.fullmatch(r"[^:]+:\d+", options.dispatcher):
        raise ValueError(
            f"Received --dispatcher={options.dispatcher}; expected HOST:PORT, such as "
            "localhost:5050."
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
