"""Slurm, really: two nodes on this machine, where its packages are installed."""

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S
from towers.cluster import addresses

ROOT = Path(__file__).parents[3]
NEEDS = "slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol"
FOUND = {name: shutil.which(name, path=f"{os.defpath}:/usr/sbin") for name in NEEDS}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(None in FOUND.values(), reason="needs slurmctld, slurmd, munge"),
    pytest.mark.skipif(os.getuid() != 0, reason="slurmd needs root"),
]

CONF = """
ClusterName=towers
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=YES
"""


def free_ports(count):
    held = [addresses.held_port("127.0.0.1") for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Starts the cluster; runs a command of Slurm's, and returns what it wrote."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "key").write_bytes(secrets.token_bytes(128))
    (folder / "key").chmod(0o600)
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(
            host=socket.gethostname(),
            user=getpass.getuser(),
            folder=folder,
            ports=free_ports(3),
            cpus=os.cpu_count(),
        )
    )
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith("SLURM")},
        **{"SLURM_CONF": str(conf), "PYTHONPATH": str(ROOT)},
    }
    munge = [f"--{each}-file={folder}/munge.{each}" for each in ("pid", "log", "seed")]
    munge += [f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
    daemons = [
        [FOUND["munged"], "--foreground", "--force", *munge],
        [FOUND["slurmctld"], "-D", "-c"],
        [FOUND["slurmd"], "-D", "-N", "node1"],
        [FOUND["slurmd"], "-D", "-N", "node2"],
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen(each, env=environ, **quiet) for each in daemons]

    def run(name, *words):
        command = [FOUND[name], *words]
        return subprocess.run(
            command,
            env=environ,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )

    try:
        # srun itself waits for nodes that are about to come.
        while run("scontrol", "ping").returncode:
            assert all(each.poll() is None for each in started)
        yield run
    finally:
        run("scontrol", "shutdown")
        for each in started[1:]:
            each.wait(HANG_S)
        started[0].terminate()
        started[0].wait(HANG_S)


MEET = """
from towers.cluster import environment
from towers.cluster.rendezvous import meet
place = environment.find()
print(meet(place) if place else None)
"""
PYTHON = sys.executable, "-c", MEET


def test_tasks_on_one_node_meet_on_its_loopback_interface(slurm):
    done = slurm("srun", "-N1", "-n2", "--overcommit", *PYTHON)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    addresses = r"addresses=\('127.0.0.1:\d+', '127.0.0.1:\d+'\)"
    assert re.search(addresses, first)[0] == re.search(addresses, second)[0]
    # There is no token here.
    assert done.stderr.count("Hosts meet without a token") == 1


def test_one_task_is_alone(slurm):
    done = slurm("srun", "-n1", *PYTHON)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")


FAILS = """
import os
from towers.cluster import environment
from towers.cluster.rendezvous import meet
met = meet(environment.find())
print("met", met.rank, met.generation, flush=True)
if not met.generation:
    os.kill(os.getpid(), 9) if met.rank else os._exit(75)
"""


def test_a_batch_script_on_two_nodes(slurm, tmp_path):
    """One command without srun, one with, and launchers that start a host again."""
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "meet.py").write_text(MEET)
    script = tmp_path / "batch.sh"
    coordinators = [f"127.0.0.1:{port}" for port in free_ports(2)]
    script.write_text(
        f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output={tmp_path}/out.txt
export TOWERS_TOKEN=$(echo $RANDOM$RANDOM | sha256sum)
{sys.executable} meet.py
TOWERS_COORDINATOR={coordinators[0]} srun {sys.executable} {tmp_path}/meet.py
srun bash -c '{sys.executable} -m towers.launch --hosts=$SLURM_NTASKS \\
    --host_rank=$SLURM_PROCID --coordinator={coordinators[1]} --max_restarts=3 \\
    -- {tmp_path}/fails.py'
echo ended with $?
"""
    )
    done = slurm("sbatch", "--wait", f"--chdir={tmp_path}", str(script))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out.txt").read_text()
    assert "Slurm has 2 tasks for this job, but srun did not start this" in text
    assert sorted(re.findall(r"Membership\(rank=(\d)", text)) == ["0", "1"]
    met = sorted(re.findall(r"met \d \d", text))
    assert met == ["met 0 0", "met 0 1", "met 1 0", "met 1 1"]
    assert len(re.findall(r"Host 1 \(pid \d+\) failed first: SIGKILL\.", text)) == 1
    assert text.endswith("ended with 0\n")
