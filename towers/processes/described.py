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


# Runs have many flags; JSON has all of them.
_LONGEST = 72
# By which Linux numbers the first space of processes, that of no container.
_FIRST_SPACE = 0xEFFFFFFC
# What a process that uses a GPU has open; the second is for WSL.
_GPU_FILES = ("/dev/nvidia", "/dev/dxg")


class Described(NamedTuple):
    """What is known of a process; empty for what its user or container hides.

    Attributes:
        pid: Its number.
        user: Whose it is.
        command: Its program and arguments.
        container: Its container or batch job, such as "docker 0123456789ab".
        outside: Whether the number is not of this container.
    """

    pid: int
    user: str = ""
    command: str = ""
    container: str = ""
    outside: bool = False

    def __str__(self) -> str:
        if self.outside:
            return f"process {self.pid} of the host, which this container does not see"
        known = [f"process {self.pid}"]
        if self.user:
            known.append(f"of {self.user}")
        if self.container:
            known.append(f"in {self.container}")
        command = self.command
        if len(command) > _LONGEST:
            command = f"{command[: _LONGEST - 3]}..."
        return " ".join(known) + (f": {command}" if command else "")


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


def describe_holder(pid: int, root: Path = Path("/")) -> Described:
    """Describes a process that NVIDIA's driver names.

    In a container, the driver may tell the host's number of a process, which is
    another process's here: only one that has a GPU open can be meant.

    Args:
        pid: Its number.
        root: The folder of /proc.
    """
    if numbers_all() or _has_gpu_open(pid, root):
        return describe(pid, root)
    return Described(pid, outside=True)


def numbers_all() -> bool:
    """Tells whether processes have the same numbers here as in the kernel."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_SPACE
    except OSError:
        return False


def _has_gpu_open(pid: int, root: Path) -> bool:
    try:
        files = [*(root / "proc" / str(pid) / "fd").iterdir()]
        return any(os.readlink(file).startswith(_GPU_FILES) for file in files)
    except OSError:
        return False  # somebody else's, or gone


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
