"""What each environment says of a process's place among hosts."""

import json
import re
import sys
import types

import pytest

from towers.cluster import environment
from towers.hosts import group
from towers.hosts.group import ProcessPlace

OURS = {
    "TOWERS_HOST_RANK": "1",
    "TOWERS_HOST_COUNT": "2",
    "TOWERS_COORDINATOR": "node0:8476",
    "TOWERS_TOKEN": "a secret of all hosts",
}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[08-10,12],gpu-a[1-2]",
    "SLURM_JOB_NODELIST": "a[1-9]",
    "SLURM_JOB_ID": "4242",
}
# As torchrun 2.14 has set them, with --nnodes=2 --nproc-per-node=2.
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# As Volcano sets them, and PyTorchJob.
PYTORCH_JOB = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
PYTORCH_JOB["MASTER_ADDR"] = "job-master-0"
# As Kubeflow's Trainer sets them.
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
HOSTS = "a:1", "b:2", "c:3"


def tf_config(kind="worker", index=0, **cluster):
    cluster = cluster or {"worker": HOSTS}
    value = {"cluster": cluster, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(value)}


ENVIRONMENTS = {
    "nothing": ({}, None),
    "ours": (OURS, ProcessPlace(1, 2, "node0:8476", "a secret of all hosts")),
    "ours, all of it": (
        OURS
        | {"TOWERS_JOIN_SECONDS": "7.5", "TOWERS_INTERFACE": "eth1"}
        | {"TOWERS_GENERATION": "3"},
        ProcessPlace(1, 2, "node0:8476", "a secret of all hosts", 7.5, "eth1", None, 3),
    ),
    "ours, before others": (
        SLURM | tf_config() | OURS,
        ProcessPlace(1, 2, "node0:8476", "a secret of all hosts"),
    ),
    "ours, alone": (OURS | {"TOWERS_HOST_RANK": "0", "TOWERS_HOST_COUNT": "1"}, None),
    "a token alone": ({"TOWERS_TOKEN": "a secret of all hosts"}, None),
    "TF_CONFIG": (
        tf_config(index=2),
        ProcessPlace(2, 3, "a:1", None, addresses=HOSTS),
    ),
    "TF_CONFIG, a chief": (
        tf_config("chief", chief=["c:1"], worker=["a:1", "b:2"]),
        ProcessPlace(0, 3, "c:1", None, addresses=("c:1", "a:1", "b:2")),
    ),
    "TF_CONFIG, a worker of a chief's": (
        tf_config("worker", "1", worker=["a:1", "b:2"], chief=["c:1"])
        | {"TOWERS_TOKEN": "a secret of all hosts", "TOWERS_GENERATION": "1"},
        ProcessPlace(
            2,
            3,
            "c:1",
            "a secret of all hosts",
            addresses=("c:1", "a:1", "b:2"),
            generation=1,
        ),
    ),
    "TF_CONFIG before Slurm": (
        SLURM | tf_config(),
        ProcessPlace(0, 3, "a:1", None, addresses=HOSTS),
    ),
    "TF_CONFIG, alone": (tf_config("chief", chief=["c:1"]), None),
    "TF_CONFIG, empty": ({"TF_CONFIG": "{}"}, None),
    "Slurm": (SLURM, ProcessPlace(2, 4, f"n08:{15_000 + 31 * 4242 % 10_000}", None)),
    "Slurm, a later step, requeued": (
        SLURM | {"SLURM_STEP_ID": "2", "SLURM_RESTART_COUNT": "1"},
        ProcessPlace(2, 4, f"n08:{15_002 + 31 * 4242 % 10_000}", None, generation=1),
    ),
    "Slurm, a step of fewer tasks": (
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"} | {"SLURM_PROCID": "0"},
        None,
    ),
    "Slurm, whose names nobody knows": (
        SLURM | {"TOWERS_COORDINATOR": "10.0.0.1:7"},
        ProcessPlace(2, 4, "10.0.0.1:7", None),
    ),
    "Open MPI, in a job of Slurm's": (
        SLURM | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"},
        ProcessPlace(1, 3, "", None, mpi="OMPI_COMM_WORLD_RANK"),
    ),
    "MPICH": (
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        ProcessPlace(0, 2, "", None, mpi="PMI_RANK"),
    ),
    "MPI, alone": ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
    "TF_CONFIG before MPI": (
        tf_config(index=2) | {"PMI_RANK": "0", "PMI_SIZE": "2"},
        ProcessPlace(2, 3, "a:1", None, addresses=HOSTS),
    ),
    "torchrun, which listens at its own port": (
        TORCHRUN,
        ProcessPlace(3, 4, "node0:29501", None),
    ),
    "torchrun, whose processes would listen there": (
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        ProcessPlace(3, 4, "node0:29500", None),
    ),
    "torchrun, at the last port": (
        TORCHRUN | {"MASTER_PORT": "65535"},
        ProcessPlace(3, 4, "node0:65534", None),
    ),
    "torchrun, by IPv6": (
        TORCHRUN | {"MASTER_ADDR": "fd00::1"},
        ProcessPlace(3, 4, "[fd00::1]:29501", None),
    ),
    "torchrun, on one machine": (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "4"},
        ProcessPlace(3, 4, "127.0.0.1:29501", None),
    ),
    "torchrun, which has restarted, in a pod of Kubeflow's": (
        TORCHRUN | TRAIN_JOB | {"TORCHELASTIC_RESTART_COUNT": "2"},
        ProcessPlace(3, 4, "node0:29501", None, generation=2),
    ),
    "torchrun, with what is for all": (
        TORCHRUN | {"TOWERS_COORDINATOR": "a:1", "TOWERS_TOKEN": OURS["TOWERS_TOKEN"]},
        ProcessPlace(3, 4, "a:1", OURS["TOWERS_TOKEN"]),
    ),
    "torchrun, in a job of Slurm's": (
        SLURM | TORCHRUN,
        ProcessPlace(3, 4, "node0:29501", None),
    ),
    "torchrun, alone": (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, None),
    "MPI before torchrun": (
        TORCHRUN | {"PMI_RANK": "0", "PMI_SIZE": "2"},
        ProcessPlace(0, 2, "", None, mpi="PMI_RANK"),
    ),
    "a pod of PyTorchJob's, or of Volcano's": (
        PYTORCH_JOB,
        ProcessPlace(3, 4, "job-master-0:29500", None),
    ),
    "a pod of Kubeflow's Trainer": (
        TRAIN_JOB,
        ProcessPlace(1, 2, "job-node-0-0.job:29400", None),
    ),
    "a pod of PyTorchJob's that counts processes": (
        PYTORCH_JOB | TRAIN_JOB,
        ProcessPlace(1, 2, "job-node-0-0.job:29400", None),
    ),
    "an elastic PyTorchJob, whose torchrun has not started this": (
        {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "job-worker-0:29400"},
        None,
    ),
    "a rank that may mean anything": ({"RANK": "1"}, None),
    "an address that may mean anything": (
        {"MASTER_ADDR": "a", "WORLD_SIZE": "1"},
        None,
    ),
    "a size of something else": ({"WORLD_SIZE": "large"}, None),
    "Slurm, on one node": (
        SLURM | {"SLURM_STEP_NODELIST": "n10"},
        ProcessPlace(2, 4, f"127.0.0.1:{15_000 + 31 * 4242 % 10_000}", None),
    ),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_an_environment_says(name):
    environ, place = ENVIRONMENTS[name]
    assert environment.find(environ) == place
    # What connects hosts is imported then, and only then.
    assert place is None or group.is_started(environ)
    assert name not in ("nothing", "a token alone") or not group.is_started(environ)


@pytest.mark.parametrize("installed", [False, True])
def test_srun_that_offers_mpi(monkeypatch, installed):
    """A cluster may do so by default: without mpi4py, hosts meet as under Slurm."""
    found = (lambda name: name) if installed else (lambda name: None)
    monkeypatch.setattr(environment.importlib.util, "find_spec", found)
    place = environment.find(SLURM | {"PMIX_RANK": "2", "SLURM_STEP_NUM_TASKS": "4"})
    assert (place.rank, place.count) == (2, 4)
    assert place.mpi == ("PMIX_RANK" if installed else None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("local", "address"), [(2, "127.0.0.1"), (1, "127.0.0.2")])
def test_a_worker_of_ray_train(monkeypatch, rank, local, address):
    """Before TF_CONFIG, whose ports Ray has picked, and before Slurm."""
    sent = []

    def broadcast(data):
        sent.append(data)
        return sent[0] or ("node0:8476", "a secret of all hosts")

    class Context:
        get_world_rank = staticmethod(lambda: rank)
        get_world_size = staticmethod(lambda: 2)
        get_local_world_size = staticmethod(lambda: local)

    collective = types.SimpleNamespace(broadcast_from_rank_zero=broadcast)
    train = types.SimpleNamespace(get_context=Context, collective=collective)
    util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.2")
    ray = types.SimpleNamespace(train=train, util=util)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    place = environment.find(SLURM | tf_config() | {"TOWERS_JOIN_SECONDS": "7"})
    assert (place.rank, place.count, place.join_seconds) == (rank, 2, 7)
    if rank:
        assert (place.coordinator, place.token) == (
            "node0:8476",
            "a secret of all hosts",
        )
    else:
        assert re.fullmatch(rf"{address}:\d+", place.coordinator)
        assert sent == [(place.coordinator, place.token)] and len(place.token) == 32


def test_the_program_that_asks_ray_train_is_alone(monkeypatch):
    def outside():
        raise RuntimeError("outside of a training function")

    train = types.SimpleNamespace(get_context=outside)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    assert environment.find({}) is None


CONTRADICTIONS = {
    "half of ours": (
        {"TOWERS_HOST_RANK": "0", "TOWERS_HOST_COUNT": "2"},
        "Received TOWERS_HOST_RANK, TOWERS_HOST_COUNT without TOWERS_COORDINATOR, "
        "TOWERS_TOKEN; expected all of them",
    ),
    "a coordinator alone": (
        {"TOWERS_COORDINATOR": "a:1"},
        "Received TOWERS_COORDINATOR without TOWERS_HOST_RANK, TOWERS_HOST_COUNT, ",
    ),
    "a rank too many": (
        OURS | {"TOWERS_HOST_RANK": "2"},
        "Received TOWERS_HOST_RANK=2 for 2 hosts; expected 0 to 1.",
    ),
    "a rank that is none": (OURS | {"TOWERS_HOST_RANK": "-1"}, "expected a whole"),
    "no host": (OURS | {"TOWERS_HOST_COUNT": "0"}, "number of at least 1"),
    "a coordinator without a port": (
        OURS | {"TOWERS_COORDINATOR": "node0"},
        "Received TOWERS_COORDINATOR=node0; expected the address",
    ),
    "no time": (OURS | {"TOWERS_JOIN_SECONDS": "0"}, "Received TOWERS_JOIN_SECONDS=0"),
    "no end": (OURS | {"TOWERS_JOIN_SECONDS": "inf"}, "for how many seconds to wait"),
    "no generation": (OURS | {"TOWERS_GENERATION": "x"}, "TOWERS_GENERATION=x"),
    "no JSON": ({"TF_CONFIG": "{"}, "TF_CONFIG: not JSON"),
    "parameter servers": (
        tf_config(worker=["a:1"], ps=["b:1"]),
        "TF_CONFIG has tasks of type ps; expected chief and worker",
    ),
    "an evaluator": (tf_config("evaluator"), "has tasks of type evaluator; expected"),
    "two chiefs": (
        tf_config("chief", chief=["a:1", "b:1"]),
        "TF_CONFIG has 2 chiefs; expected at most 1.",
    ),
    "a task too many": (tf_config(index=3), "expected an index from 0 to 2"),
    "a rank of Slurm's too many": (SLURM | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 for"),
    "a node list that is none": (
        SLURM | {"SLURM_STEP_NODELIST": "n[1-,"},
        "Received the node list 'n[1-,'; expected one of Slurm's, such as n[1-3,7].",
    ),
    "a rank of torchrun's too many": (
        TORCHRUN | {"RANK": "4"},
        "Received RANK=4 for 4",
    ),
    "a rank of a pod too many": (
        TRAIN_JOB | {"PET_NODE_RANK": "2"},
        "Received PET_NODE_RANK=2 for 2 hosts; expected 0 to 1.",
    ),
    "a range of nodes": (TRAIN_JOB | {"PET_NNODES": "1:4"}, "PET_NNODES=1:4; expected"),
    "a port of torchrun's that is none": (
        TORCHRUN | {"MASTER_PORT": "0"},
        "Received MASTER_ADDR=node0 and MASTER_PORT=0; expected the name or",
    ),
    "no restarts of torchrun's": (
        TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "no"},
        "Received TORCHELASTIC_RESTART_COUNT=no; expected a whole number",
    ),
    "PMIx without a size": (
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-node0-4711@1"},
        "Received PMIX_RANK=1 without the number of processes; start with mpirun",
    ),
    "no job": ({**SLURM, "SLURM_JOB_ID": ""}, "Received SLURM_JOB_ID=; expected"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_one_sentence(name):
    environ, said = CONTRADICTIONS[name]
    with pytest.raises(ValueError) as caught:
        environment.find(environ)
    assert said in str(caught.value)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_process_that_srun_did_not_start_trains_alone_and_says_so(monkeypatch):
    said = []
    monkeypatch.setattr(environment, "warn", said.append)
    without = {name: SLURM[name] for name in SLURM if name != "SLURM_STEP_ID"}
    assert environment.find(without) is None
    assert len(said) == 1 and said[0].startswith("Slurm has 4 tasks for this job, but")


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("MASTER_ADDR", "WORLD_SIZE is 4, but MASTER_ADDR is missing, so this process"),
        ("RANK", "WORLD_SIZE is 4, but RANK is missing, so this process trains alone;"),
    ],
)
def test_a_place_without_all_of_torchrun_s_variables(monkeypatch, lacks, said):
    warnings = []
    monkeypatch.setattr(environment, "warn", warnings.append)
    environ = {name: value for name, value in TORCHRUN.items() if name != lacks}
    assert group.is_started(environ) and environment.find(environ) is None
    assert len(warnings) == 1 and warnings[0].startswith(said)


def test_nothing_is_said_of_variables_that_may_mean_anything(monkeypatch):
    warnings = []
    monkeypatch.setattr(environment, "warn", warnings.append)
    for name in ENVIRONMENTS:
        environment.find(ENVIRONMENTS[name][0])
    assert warnings == []


def test_what_the_launcher_sets_is_found():
    place = ProcessPlace(
        1, 3, "[::1]:7", "a secret of all hosts", 2.5, "lo", generation=4
    )
    assert environment.find(environment.variables(place)) == place


def test_a_short_token_is_refused_and_not_shown():
    with pytest.raises(
        ValueError, match="a TOWERS_TOKEN of 4 characters; expected at"
    ) as e:
        environment.find(OURS | {"TOWERS_TOKEN": "7391"})
    assert "7391" not in str(e.value)
    assert environment.token({"TOWERS_TOKEN": "x" * 16}) == "x" * 16
    assert environment.token({"TOWERS_TOKEN": ""}) is None


@pytest.mark.parametrize("restarted", [False, True])
def test_whether_others_have_begun_before(restarted):
    place = ProcessPlace(
        0, 1, "node0:8476", "a secret of all hosts", generation=int(restarted)
    )
    assert environment.restarted(environment.variables(place)) == restarted
    assert not environment.restarted({})
    for launcher in (TORCHRUN, SLURM):
        assert not environment.restarted(launcher)


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_launcher_that_has_begun_before(name):
    """A requeued job may start our own launcher, which counts from 0 again."""
    assert environment.restarted({name: "1", "TOWERS_GENERATION": "0"})


def test_one_process_of_a_requeued_job_goes_on(monkeypatch):
    for name in group.STARTED:
        monkeypatch.delenv(name, raising=False)
    assert not group.restarted()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert group.restarted() and environment.find() is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n2,n10", "n2"),
        ("n[2,10]", "n2"),
        ("n[008-120]", "n008"),
        ("gpu-a[01-02],n7", "gpu-a01"),
        ("rack[1-2]n[05-06]-ib,x", "rack1n05-ib"),
        ("node.a.org,node.b.org", "node.a.org"),
    ],
)
def test_the_first_node_of_slurms_list(nodes, first):
    assert environment.first_node(nodes) == first


@pytest.mark.parametrize(
    ("environ", "name", "expected"),
    [
        (SLURM, "n7", (2, "SLURM_PROCID", "n08:")),
        (SLURM | {"TOWERS_COORDINATOR": "a:1"}, "n7", (2, "SLURM_PROCID", "a:1")),
        ({"JOB_COMPLETION_INDEX": "3"}, "train-9", (3, "JOB_COMPLETION_INDEX", None)),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            *("train-12", (12, "the name of the pod train-12", None)),
        ),
    ],
)
def test_tasks_that_a_scheduler_has_started(environ, name, expected):
    rank, by, coordinator = expected
    found = environment.task(environ, name)
    assert (found.rank, found.by) == (rank, by)
    assert (found.coordinator or "").startswith(coordinator or "")
    assert (found.coordinator is None) == (coordinator is None)


@pytest.mark.parametrize("name", ["train-12", "train"])
def test_no_scheduler_has_started_a_task(name):
    known = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"} if name == "train" else {}
    with pytest.raises(ValueError, match="Received --host_rank=auto, but neither"):
        environment.task(known, name)
