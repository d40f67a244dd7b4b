"""Takes the disk away from a run: full, limited, read-only. Needs the right to mount.

python -m scripts.faults.disk
"""

import contextlib
import pathlib
import resource
import subprocess
import tempfile

from scripts.faults import run
from towers.lifecycle.checkpoints import store


def main() -> None:
    """Lets each happen to a run that has a checkpoint, and says what is left."""
    for reaction in ("stop", "continue"):
        for name, fault in (
            ("a full disk", full),
            ("a limit on the size of files", limited),
            ("a read-only disk", read_only),
        ):
            with tempfile.TemporaryDirectory() as folder:
                model_dir = pathlib.Path(folder) / "run"
                code, said = fault(model_dir, f"--on_save_error={reaction}")
                good = _count_good(model_dir)
                _unmount(model_dir)
            print(f"{name}, {reaction}: exit code {code}, {good} good checkpoints left")
            print(
                f"    {said.splitlines()[-1] if said else 'nothing said'}", flush=True
            )


def full(model_dir: pathlib.Path, *flags: str) -> tuple[int, str]:
    """Three checkpoints fit."""
    _mount(model_dir, "size=14m")
    return run.finish(model_dir, "--train_epochs=6", *flags)


def limited(model_dir: pathlib.Path, *flags: str) -> tuple[int, str]:
    """From the second run on, no file may be larger than 1 MB."""
    run.finish(model_dir, "--train_epochs=1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        return run.finish(model_dir, "--train_epochs=2", *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def read_only(model_dir: pathlib.Path, *flags: str) -> tuple[int, str]:
    """In the middle of the second run, nothing can be written any more."""
    _mount(model_dir, "size=100m")
    run.finish(model_dir, "--train_epochs=1")
    process = run.start(model_dir, "--train_epochs=20", *flags)
    folder = model_dir / "checkpoints"
    subprocess.run(["mount", "-o", "remount,ro", folder], check=False)
    return run.end(process)


def _mount(model_dir, options):
    folder = model_dir / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    subprocess.run(mount, check=True)


def _unmount(model_dir):
    subprocess.run(["umount", model_dir / "checkpoints"], capture_output=True)


def _count_good(model_dir):
    good = 0
    for path in store.find(str(model_dir / "checkpoints")):
        with contextlib.suppress(store.DamagedError):
            store.load(path)
            good += 1
    return good


if __name__ == "__main__":
    main()
