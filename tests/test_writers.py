"""Files are written by `towers.program.whole_file`, or there is a reason why not."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Calls that write or rename files, by the last part of their name.
WRITES = {
    *("write_text", "write_bytes", "save_weights", "savefig", "write_out", "tofile"),
    *("TFRecordWriter", "create_file_writer", "memmap", "open_memmap", "CSVLogger"),
    *("link", "symlink", "copyfile", "copytree"),
    *("savez", "savetxt", "mkstemp", "NamedTemporaryFile"),
}
# These write only if the mode says so, which is their second argument.
OPENS = {"open", "GFile", "fdopen", "ZipFile", "H5File", "File"}
# These have many meanings: of which they write.
OF = {
    "save": {"np", "model", "image"},
    "replace": {"os"},
    "move": {"shutil"},
    "rename": {"os", "gfile", "whole_file"},
}

_WHOLE = "writes into a file or folder that is renamed when it is whole"
_OPENED = "writes into a file that whole_file has opened"
_TEMPORARY = "a temporary file, which nobody reads later"
_STREAM = "a pipe or a device, which has no name of its own"
_USER = "nothing of a run: a user names the file, and makes it again"
ALLOWED = {
    "towers/program/whole_file.py": "the one that does it",
    "towers/program/locks.py": "a lock, which has no content",
    "towers/program/startup.py": _STREAM,
    "towers/program/compilation_cache.py": "a result has a checksum, and may be lost",
    "towers/doctor/network.py": _STREAM,
    "towers/doctor/probe.py": _STREAM,
    "towers/collectives/spread/variable.py": _TEMPORARY,
    "towers/cluster/hosts.py": "a copy of the first host's checkpoint",
    "towers/train/parts/fine_tune.py": _TEMPORARY,
    "input_pipeline/sources/examples/framing.py": _TEMPORARY,
    "input_pipeline/sources/files/stored.py": _TEMPORARY,
    "towers/processes/child.py": "a log: each line is appended",
    "towers/monitoring/tensorboard/callback.py": "a log: each event is appended",
    "towers/train/outputs/mistakes.py": "a log: each event is appended",
    "towers/lifecycle/checkpoints/store.py": _WHOLE,
    "towers/export/saved_model.py": _WHOLE,
    "towers/train/outputs/files.py": _WHOLE,
    "towers/numerics/recorded_step.py": _OPENED,
    "towers/report/charts.py": "drawn in memory",
    "towers/predict/output.py": _USER,
    "towers/train/callbacks.py": _STREAM,
    "towers/processes/signals.py": _STREAM,
    "input_pipeline/checked_files.py": _WHOLE,
    "input_pipeline/cache/read.py": _WHOLE,
    "input_pipeline/convert/writer.py": _WHOLE,
    "input_pipeline/local_store/packs.py": "a pack has checksums, and may be lost",
    "input_pipeline/sources/texts/tokens.py": _WHOLE,
    "input_pipeline/sources/tables/table_pass.py": _OPENED,
    "input_pipeline/sources/array_files/numpy_files.py": "maps a file to read",
    "input_pipeline/text/hub.py": "in a temporary folder, for an archive in memory",
}


def test_whoever_writes_has_a_reason():
    found = {str(path) for path, _ in _writers()}
    others = found - ALLOWED.keys()
    assert not others, [str(pair) for pair in _writers() if str(pair[0]) in others]


def test_no_reason_is_left_over():
    assert not ALLOWED.keys() - {str(path) for path, _ in _writers()}


def _writers():
    """Each call that may write a file: where, and which."""
    for folder in ("towers", "input_pipeline", "models"):
        # `rglob` does not follow the links in `towers`.
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and _writes(node):
                    yield path.relative_to(ROOT), f"{ast.unparse(node)}:{node.lineno}"


def _writes(call):
    of, _, name = ast.unparse(call.func).rpartition(".")
    if name in OF and of.rpartition(".")[2] not in OF[name]:
        return False
    if name == "open" and of == "os":
        return any(flag in ast.unparse(call) for flag in ("O_WRONLY", "O_CREAT"))
    if name in OPENS:
        modes = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
        return any(_may_write(mode, sure=name == "open" and of) for mode in modes)
    return (of != "whole_file" and name in WRITES) or name in OF


def _may_write(mode, sure):
    """Whether a mode of `open` is one to write, or is not known and may be."""
    if isinstance(mode, ast.Constant):
        return isinstance(mode.value, str) and mode.value not in ("r", "rb", "rt")
    # `store.open(name, paths)` opens no file by a mode.
    return not sure
