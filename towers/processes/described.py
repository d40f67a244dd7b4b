"""Says what a process is: whose, which command, in which container."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import psutil

# In the path of a control group: which runtime made it, and the container's identity.
# Docker, containerd and CRI-O (Kubernetes) and Podman name scopes, or folders of
# cgroups v1; Slurm has a folder for each job, and LXC for each container.
_CONTAINERS = (
    (r"(?:docker[-/])([0-9a-f]{12})[0-9a-f]*", "docker"),
    (r"(?:libpod-)([0-9a-f]{12})[0-9a-f]*", "podman"),
    (r"(?:cri-containerd-|containerd-)([0-9a-f]{12})[0-9a-f]*", "containerd"),
    (r"(?:crio-)([0-9a-f]{12})[0-9a-f]*", "cri-o"),
    (r"kubepods.*/([0-9a-f]{12})[0-9a-f]{52}", "kubernetes"),
    (r"(?:^|/)job_(\d+)", "slurm job"),
    (r"(?:/lxc/|lxc\.payload\.)([^/]+)", "lxc"),
)


class Described(NamedTuple):
    """What is known of a process; empty for what its user or container hides.

    Attributes:
        pid: Its number.
        user: Whose it is.
        command: Its program and arguments.
        container: Its container or batch job, such as "docker 0123456789ab".
    """

    pid: int
    user: str = ""
    command: str = ""
    container: str = ""

    def __str__(self) -> str:
        known = [f"process {self.pid}"]
        if self.user:
            known.append(f"of {self.user}")
        if self.container:
            known.append(f"in {self.container}")
        return " ".join(known) + (f": {self.command}" if self.command else "")


def describe(pid: int, root: Path = Path("/")) -> Described:
    """Describes a process, as far as it can be seen from here.

    Args:
        pid: Its number.
        root: The folder of /proc.
    """
    user = command = ""
    try:
        process = psutil.Process(pid)
        user = process.username()
        command = " ".join(process.cmdline()) or process.name()
    except (psutil.Error, OSError):
        pass  # gone, or somebody else's
    try:
        text = (root / "proc" / str(pid) / "cgroup").read_text()
    except (OSError, ValueError):
        text = ""
    return Described(pid, user, command, container(text))


def container(text: str) -> str:
    """Finds a container or batch job in what /proc/PID/cgroup says; empty if none.

    Args:
        text: Lines of cgroups v1 or v2, "NUMBER:CONTROLLERS:PATH".
    """
    paths = [line.split(":", 2)[2] for line in text.splitlines() if line.count(":") > 1]
    for pattern, kind in _CONTAINERS:
        for path in paths:
            if found := re.search(pattern, path):
                return f"{kind} {found[1]}"
    return ""


def folder_of_lock(pid: int, name: str) -> str:
    """Returns the folder in which a process has a file of this name open.

    Empty if there is none, or it cannot be seen from here.
    """
    try:
        opened = psutil.Process(pid).open_files()
    except (psutil.Error, OSError):
        return ""
    folders = [os.path.dirname(file.path) for file in opened]
    files = [os.path.basename(file.path) for file in opened]
    return folders[files.index(name)] if name in files else ""
