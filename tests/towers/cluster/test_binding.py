"""Servers listen on one address: Python's own, and TensorFlow's."""

import _socket
import os
import re
import socket
import subprocess
import sys

import pytest

from tests import warm
from towers.cluster import binding, interfaces

own_sockets = pytest.mark.skipif(
    not hasattr(_socket, "__file__"), reason="this Python has sockets built in"
)


def _confined(address="127.0.0.1"):
    return binding.confined(address, library=_socket.__file__)


def _bound(family, address, kind=socket.SOCK_STREAM):
    opened = socket.socket(family, kind)
    if family == socket.AF_INET6:
        opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    opened.bind((address, 0))
    if kind == socket.SOCK_STREAM:
        opened.listen()
    return opened


@own_sockets
@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_confines_wildcards(wildcard):
    family = socket.AF_INET6 if ":" in wildcard else socket.AF_INET
    with _confined(), _bound(family, wildcard) as opened:
        at, port = opened.getsockname()[:2]
        assert at == ("127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1")
        binding.check(port, "127.0.0.1")
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
    with _bound(family, wildcard) as opened:
        at, port = opened.getsockname()[:2]
        assert at == wildcard
        with pytest.raises(
            binding.NotConfinedError, match=rf"0\.1 only.* port {port},"
        ):
            binding.check(port, "127.0.0.1")


@own_sockets
def test_leaves_other_sockets_alone():
    with _confined():
        with _bound(socket.AF_INET, "127.0.0.3") as opened:
            assert opened.getsockname()[0] == "127.0.0.3"
        with _bound(socket.AF_INET, "0.0.0.0", socket.SOCK_DGRAM) as opened:
            assert opened.getsockname()[0] == "0.0.0.0"
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind("\0towers-test-binding")
            assert opened.getsockname() == b"\0towers-test-binding"


@own_sockets
def test_errors_are_those_of_bind():
    with _confined(), _bound(socket.AF_INET, "") as opened:
        with socket.socket() as second, pytest.raises(OSError, match="in use"):
            second.bind(("", opened.getsockname()[1]))
    # Rather no socket than one that is open to all.
    with _confined("::1"), pytest.raises(OSError, match="assign"):
        _bound(socket.AF_INET, "0.0.0.0")
    with _confined("192.0.2.77"), pytest.raises(OSError, match="assign"):
        _bound(socket.AF_INET, "0.0.0.0")


def test_a_way_that_fails_is_an_error():
    with (
        pytest.raises(binding.NotConfinedError, match=r"no library with '/nowhere/'"),
        binding.confined("127.0.0.1", library="/nowhere/"),
    ):
        pass
    with _bound(socket.AF_INET, "127.0.0.1") as opened:
        port = opened.getsockname()[1]
    with pytest.raises(binding.NotConfinedError, match=f"expected .*port {port},"):
        binding.check(port, "127.0.0.1")


def test_an_unknown_system_is_an_error(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with (
        pytest.raises(binding.NotConfinedError, match=r"Linux on riscv64 .*firewall"),
        binding.confined("127.0.0.1"),
    ):
        pass


_SERVER = """
import contextlib, socket
import tensorflow as tf
from towers.cluster import binding

for context in contextlib.nullcontext(), binding.confined("127.0.0.1"):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with context:
        server = tf.distribute.Server({"worker": [f"127.0.0.1:{port}"]})
    try:
        binding.check(port, "127.0.0.1")
    except binding.NotConfinedError as error:
        print(error)
    for address in "127.0.0.1", "127.0.0.2":
        with socket.socket() as client:
            print(address, client.connect_ex((address, port)))
import os, sys
sys.stdout.flush()
os._exit(0)
"""


def test_tensorflows_server():
    done = warm.run("tests.program", _SERVER, timeout_s=100)
    lines = done.stdout.splitlines()
    assert len(lines) == 5, done
    # So it is by itself: else this module has no use.
    assert "listens on ::, port" in lines[0]
    assert lines[1:3] == ["127.0.0.1 0", "127.0.0.2 0"]
    assert lines[3:] == ["127.0.0.1 0", "127.0.0.2 111"]


_HOST = """
import os, signal, sys
signal.alarm(100)
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context
from towers.cluster import binding

rank, *ports = map(int, sys.argv[1:])
ctx = context.context()
leader = "/job:worker/replica:0/task:0"
ctx.configure_collective_ops(leader, device_filters=[f"/job:worker/task:{rank}"])
ctx.configure_coordination_service(
    "standalone", service_leader=leader, coordinated_jobs=[
        coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=2)
    ],
)
server = tensorflow_server_pb2.ServerDef(
    job_name="worker", task_index=rank, protocol="grpc",
    default_session_config=ctx.config,
)
job = server.cluster.job.add(name="worker")
for task, port in enumerate(ports):
    job.tasks[task] = f"127.0.0.1:{port}"
ctx.enable_collective_ops(server)
with binding.confined("127.0.0.1"):
    ctx.ensure_initialized()
binding.check(ports[rank], "127.0.0.1")
token = tf.Variable(0.0)
summed = tf.raw_ops.CollectiveReduceV2(
    input=[1.0, rank], group_size=2, group_key=1, instance_key=1,
    ordering_token=[token.handle], merge_op="Add", final_op="Id",
)
print(summed.numpy().tolist(), flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.slow
def test_a_cluster_of_two():
    with _bound(socket.AF_INET, "") as first, _bound(socket.AF_INET, "") as second:
        ports = [str(opened.getsockname()[1]) for opened in (first, second)]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", _HOST, rank, *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        )
        for rank in ("0", "1")
    ]
    try:
        for host, port in zip(hosts, ports, strict=True):
            assert host.stdout.readline() == "[2.0, 1.0]\n"
            socket.create_connection(("127.0.0.1", port)).close()
            for name, addresses in interfaces.addresses().items():
                for address in addresses if name != "lo" else ["127.0.0.2", "::1"]:
                    with pytest.raises(OSError):
                        socket.create_connection((address, port), timeout=5)
    finally:
        for host in hosts:
            host.kill()
            host.communicate()


def test_addresses_of_interfaces():
    assert interfaces.addresses()["lo"][0] == "127.0.0.1"
    assert interfaces.interface_address("lo") == "127.0.0.1"
    assert interfaces.interface_address("127.0.0.5") == "127.0.0.5"


@pytest.mark.parametrize(
    "wanted, says",
    [
        ("eth77", "is no interface here"),
        ("192.0.2.77", "is no address of this machine"),
        ("2001:db8::77", "is no address of this machine"),
        ("0.0.0.0", "means all interfaces"),
        ("::", "means all interfaces"),
    ],
)
def test_addresses_that_are_not_here(wanted, says):
    message = rf"^--interface={re.escape(wanted)} {says}.*; this machine has lo \(127"
    with pytest.raises(ValueError, match=message):
        interfaces.interface_address(wanted)
