"""Runs a dispatcher or a worker of a tf.data service.

    python -m towers.input_pipeline.service dispatcher --port=5050
    python -m towers.input_pipeline.service worker --dispatcher=localhost:5050

Start one dispatcher, and as many workers as you need, on machines that see the same
files. Training finds them by --data_service=grpc://localhost:5050. The service has no
passwords: anyone who reaches its ports can run graphs there. Keep the ports inside your
own network. Ctrl-C or SIGTERM ends a dispatcher or a worker.
"""

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from absl import flags

from towers.processes import signals
from towers.program import startup, voice
from towers.program.commands import fail
from towers.program.flags import command_line

FLAGS = flags.FLAGS
_PROGRAM = "towers.input_pipeline.service"

_ROLES = ("dispatcher", "worker")


def _define_flags() -> None:
    group = {"module_name": "Flags"}
    flags.DEFINE_integer(
        "port",
        0,
        "Port to listen on. 0 takes any free port.",
        lower_bound=0,
        upper_bound=65535,
        **group,
    )
    flags.DEFINE_string(
        "dispatcher",
        None,
        "Address of the dispatcher that a worker belongs to, such as node1:5050.",
        **group,
    )
    flags.DEFINE_string(
        "address",
        "localhost",
        "Name under which other machines reach the machine of a worker.",
        **group,
    )


def main() -> int:
    """Runs a dispatcher or a worker.

    Returns:
        The exit code.
    """
    # A service has no use for GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    role = None

    def read(argv):
        nonlocal role
        groups = {"Flags": FLAGS.flags_by_module_dict()["Flags"]}
        role = check(command_line.read(argv, __doc__, groups))

    startup.begin(_PROGRAM, read)
    from tensorflow.data.experimental import service

    # Servers run in their own threads; the main thread waits for a signal. Other
    # threads run already, and one of them may receive the signal.
    ended = threading.Event()
    signals.listen((signal.SIGINT, signal.SIGTERM), lambda number: ended.set())
    startup.end()
    if role == "dispatcher":
        try:
            server = service.DispatchServer(service.DispatcherConfig(port=FLAGS.port))
        except Exception as error:  # TensorFlow's own kinds
            return fail(f"cannot listen on port {FLAGS.port}: {error}", _PROGRAM)
        print(f"dispatcher at {server.target}", flush=True)
    else:
        config = service.WorkerConfig(
            FLAGS.dispatcher,
            worker_address=f"{FLAGS.address}:%port%",
            port=FLAGS.port,
            dispatcher_timeout_ms=10_000,
        )
        host, _, port = FLAGS.dispatcher.partition(":")
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
            server = service.WorkerServer(config)
        except Exception as error:  # TensorFlow's own kinds, too
            return fail(
                f"no dispatcher answers at {FLAGS.dispatcher}: {error}", _PROGRAM
            )
        print(f"worker of {FLAGS.dispatcher}", flush=True)
    # Neither of TensorFlow's configurations has an address to listen on.
    voice.say(
        f"The {role} listens on all addresses of this machine, as TensorFlow binds it "
        "to none, and asks for no password: who reaches it can run graphs here. Have a "
        "firewall let in your own machines only."
    )
    ended.wait()
    # To end in order, a server would wait for clients that may have gone.
    sys.stdout.flush()
    os._exit(0)


def check(argv: Sequence[str]) -> str:
    """Checks the arguments, and returns the role.

    Raises:
        ValueError: the arguments are not a role.
    """
    if len(argv) != 2 or argv[1] not in _ROLES:
        raise ValueError(
            f"received {' '.join(argv[1:]) or 'no role'}; expected dispatcher or worker"
        )
    if (argv[1] == "worker") != (FLAGS.dispatcher is not None):
        raise ValueError(
            f"received --dispatcher={FLAGS.dispatcher} for a {argv[1]}; expected it "
            "for a worker, and for nothing else"
        )
    if FLAGS.dispatcher and not re.fullmatch(r"[^:]+:\d+", FLAGS.dispatcher):
        raise ValueError(
            f"received --dispatcher={FLAGS.dispatcher}; expected HOST:PORT, such as "
            "localhost:5050"
        )
    return argv[1]


if __name__ == "__main__":
    _define_flags()
    sys.exit(main())
