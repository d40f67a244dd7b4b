"""Where files lie, and in which parts they are read; needs no TensorFlow."""

import os
from collections.abc import MutableMapping

import psutil

# Of Google's object store, TensorFlow reads so much at a time, whatever is asked for.
# It looks at this when it is imported.
_READS_AHEAD = "GCS_READAHEAD_BUFFER_SIZE_BYTES"
_TENSORFLOWS = 64 * 2**20
_BLOCK_BYTES = 4 * 2**20

_NETWORK = ("9p", "afs", "beegfs", "ceph", "cifs", "davfs", "fuse", "glusterfs")
_NETWORK = (*_NETWORK, "gpfs", "lustre", "nfs", "smb", "virtiofs")


def read_small_blocks(environ: MutableMapping[str, str] = os.environ) -> None:
    """Has TensorFlow read parts of 4 MB; only before it is imported."""
    environ.setdefault(_READS_AHEAD, str(_BLOCK_BYTES))


def block_bytes(path: str) -> int:
    """Bytes in which a file is read: as few as its file system can read at a time."""
    if not path.startswith("gs://"):
        return _BLOCK_BYTES
    asked = os.environ.get(_READS_AHEAD, "")
    # As TensorFlow: what is no number does not count; 0 has it read what is asked for.
    return (int(asked) or _BLOCK_BYTES) if asked.isdecimal() else _TENSORFLOWS


def is_far(path: str) -> bool:
    """Tells whether a file is not on a disk of this machine, as far as is known."""
    if "://" in path:
        return True
    path = os.path.realpath(os.path.expanduser(path))
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if os.path.commonpath([path, mount.mountpoint]) == mount.mountpoint
    ]
    nearest = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return nearest is not None and nearest.fstype.startswith(_NETWORK)
