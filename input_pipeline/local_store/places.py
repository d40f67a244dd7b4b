"""Tells which files are far, and the size of reads; needs no TensorFlow."""

import os
from collections.abc import MutableMapping

import psutil

# TensorFlow reads this much at a time from Google's object store, whatever is
# requested. It reads the variable when it is imported.
_READS_AHEAD = "GCS_READAHEAD_BUFFER_SIZE_BYTES"
_TENSORFLOWS = 64 * 2**20
_BLOCK_BYTES = 4 * 2**20

_NETWORK = ("9p", "afs", "beegfs", "ceph", "cifs", "davfs", "fuse", "glusterfs")
_NETWORK = (*_NETWORK, "gpfs", "lustre", "nfs", "smb", "virtiofs")


def read_small_blocks(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes TensorFlow read parts of 4 MB; call it before TensorFlow is imported."""
    environ.setdefault(_READS_AHEAD, str(_BLOCK_BYTES))


def block_bytes(path: str) -> int:
    """Returns the block size for a file: the least that its file system can read."""
    if not path.startswith("gs://"):
        return _BLOCK_BYTES
    asked = os.environ.get(_READS_AHEAD, "")
    # As in TensorFlow: a value that is no number is ignored; 0 turns read-ahead off.
    return (int(asked) or _BLOCK_BYTES) if asked.isdecimal() else _TENSORFLOWS


def is_far(path: str) -> bool:
    """Tells whether a file is not on a disk of this machine, as far as known."""
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
