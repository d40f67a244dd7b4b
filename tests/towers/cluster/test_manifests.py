"""The manifest for Kubernetes and the script for Slurm start hosts that find places."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts import docs_flags
from tests.limits import HANG_S
from towers.cluster import environment
from towers.hosts.group import ProcessPlace

EXAMPLES = Path(__file__).parents[3] / "examples"
JOBSET = EXAMPLES / "kubernetes" / "jobset.yaml"
SCRIPT = EXAMPLES / "slurm" / "train.sh"


def flags_in(words):
    return {word.partition("=")[0] for word in words if word.startswith("--")}


# Kubernetes.


@pytest.fixture(scope="module")
def manifest():
    """The objects by kind."""
    yaml = pytest.importorskip("yaml")
    return {each["kind"]: each for each in yaml.safe_load_all(JOBSET.read_text())}


@pytest.fixture
def job(manifest):
    [replicated] = manifest["JobSet"]["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


@pytest.fixture
def pod(job):
    return job["template"]["spec"]


def environ_of(pod, annotations, secrets):
    """The environment of a pod, with the annotations that controllers have set."""
    environ = {}
    for variable in pod["containers"][0]["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            value = annotations[
                re.fullmatch(r"metadata.annotations\['(.*)'\]", path)[1]
            ]
        elif "secretKeyRef" in source:
            value = secrets[source["secretKeyRef"]["name"]][
                source["secretKeyRef"]["key"]
            ]
        else:
            value = variable["value"]
        assert isinstance(value, str)
        environ[variable["name"]] = value
    return environ


def test_a_jobset_s_pods_find_their_places(manifest, job, pod):
    jobset = manifest["JobSet"]
    [replicated] = jobset["spec"]["replicatedJobs"]
    # As the comment makes it.
    made = r"secret generic (\w+) --from-literal=(\w+)="
    name, key = re.search(made, JOBSET.read_text()).groups()
    token = "a secret of all hosts"
    first = f"{jobset['metadata']['name']}-{replicated['name']}-0-0"
    service = jobset["spec"]["network"]["subdomain"]
    assert job["completions"] == job["parallelism"]
    for rank in range(job["completions"]):
        # The Job's controller sets the first one, and JobSet's the second.
        annotations = {
            "batch.kubernetes.io/job-completion-index": str(rank),
            "jobset.sigs.k8s.io/restart-attempt": "3",
        }
        environ = environ_of(pod, annotations, {name: {key: token}})
        assert environment.find(environ) == ProcessPlace(
            *(rank, job["completions"], f"{first}.{service}:8476", token),
            generation=3,
        )


def test_a_jobset_s_pods_run_towers_train(manifest, pod):
    [container] = pod["containers"]
    assert container["command"] == ["python", "-m", "towers.train"]
    assert flags_in(container["args"]) <= docs_flags.flags_of("train")
    # The checkpoints outlive a pod.
    [volume] = [each for each in pod["volumes"] if "persistentVolumeClaim" in each]
    claim = manifest["PersistentVolumeClaim"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    model_dir = next(flag for flag in container["args"] if "--model_dir" in flag)
    assert model_dir.startswith(f"--model_dir={mounts[volume['name']]}/")


def test_a_failure_ends_and_starts_all_pods_of_a_jobset(manifest, job, pod):
    # A failed pod fails the job at once, and so the JobSet starts it anew.
    assert pod["restartPolicy"] == "Never" and job["backoffLimit"] == 0
    policy = manifest["JobSet"]["spec"]["failurePolicy"]
    assert policy["restartStrategy"] == "BlockingRecreate" and policy["maxRestarts"] > 0
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]


def test_only_a_jobset_s_own_pods_reach_one_another(manifest):
    policy = manifest["NetworkPolicy"]["spec"]
    labels = {"jobset.sigs.k8s.io/jobset-name": manifest["JobSet"]["metadata"]["name"]}
    own = {"podSelector": {"matchLabels": labels}}
    assert policy == {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}


# Slurm.

_STUBS = {
    # Slurm tells the script that its time is nearly over, and ends the tasks as asked.
    "srun": """
printf '%s\\n' "$@" > words
echo -n "$TOWERS_TOKEN" > token
[ "$IS_OVER" ] && kill -USR1 $PPID && read asked < signals && echo "$asked" > asked
exit $ENDS_WITH
""",
    "scancel": """
echo "$@" > signals
""",
    "scontrol": """
echo "$@" > requeued
""",
}


@pytest.mark.parametrize(
    ("ends_with", "is_over"),
    [(0, False), (1, False), (143, False), (143, True), (0, True)],
)
def test_a_batch_script_starts_a_task_on_each_node(tmp_path, ends_with, is_over):
    for name, text in _STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash{text}")
        (tmp_path / name).chmod(0o700)
    os.mkfifo(tmp_path / "signals")
    # As Slurm sets them in a batch script of two nodes.
    job = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}
    done = subprocess.run(
        [SCRIPT],
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "ENDS_WITH": str(ends_with),
            "IS_OVER": "1" if is_over else "",
            **job,
        },
        timeout=HANG_S,
    )
    assert done.returncode == ends_with
    words = (tmp_path / "words").read_text().split()
    start = words.index("python")
    assert words[start : start + 3] == ["python", "-m", "towers.train"]
    assert flags_in(words[start:]) <= docs_flags.flags_of("train")
    for rank in (0, 1):
        step = {"SLURM_PROCID": str(rank), "SLURM_STEP_ID": "0"}
        token = {"TOWERS_TOKEN": (tmp_path / "token").read_text()}
        place = environment.find({**job, **step, **token})
        assert (place.rank, place.count, place.token) == (rank, 2, *token.values())
        assert place.coordinator.startswith("n1:")
    if is_over:
        assert (tmp_path / "asked").read_text() == "--signal=TERM 4242\n"
    # srun ends with 143, too, if it has ended the other tasks for one that has failed.
    requeued = tmp_path / "requeued"
    assert requeued.exists() == (is_over and ends_with == 143)
    assert not requeued.exists() or requeued.read_text() == "requeue 4242\n"


def test_a_batch_script_asks_for_what_a_requeue_needs():
    asked = re.findall(r"^#SBATCH (\S+)$", SCRIPT.read_text(), re.MULTILINE)
    assert {"--nodes=2", "--ntasks-per-node=1", "--requeue"} <= {*asked}
