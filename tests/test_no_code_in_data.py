"""Data of a run, a cache or another host are read, and nothing of them is run."""

import ast

from tests.test_layout import _trees

# Each runs what it is given, or can be made to.
CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("pickle.load", "pickle.loads", "marshal.load", "marshal.loads", "shelve.open"),
    *("yaml.load", "joblib.load", "importlib.import_module", "os.system"),
    *("keras.config.enable_unsafe_deserialization", "module.exec_module"),
    "found.loader.exec_module",
    "json.load",
}
# By file: the calls that it may have, none of which is told what by data.
KNOWN = {
    # The user's own file, which the command line names.
    "models/user_file.py": {"found.loader.exec_module"},
    # Modules of this package, and NVIDIA's.
    "input_pipeline/sources/__init__.py": {"importlib.import_module"},
    "towers/machine/nvml.py": {"importlib.import_module"},
    "towers/program/extras.py": {"importlib.import_module"},
    "towers/program/lazy.py": {"importlib.import_module"},
    "towers/program/features.py": {"importlib.import_module"},
    # Tokens of a cache in a folder that the user names.
    "input_pipeline/sources/texts/tokens.py": {"json.load"},
}
UNSAFE = {"allow_pickle": True, "safe_mode": False}


def test_nothing_runs_what_it_reads():
    """Files of JSON are read by `small_file`, and no module evaluates what it reads."""
    for path, tree in _trees().items():
        if path.parts[0] == "scripts":
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in CALLS:
                assert called in KNOWN.get(str(path), ()), f"{path} calls {called}"
            for option in node.keywords:
                if option.arg in UNSAFE and isinstance(option.value, ast.Constant):
                    assert option.value.value != UNSAFE[option.arg], (
                        f"{path}: {option.arg}"
                    )
