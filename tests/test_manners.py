"""How programs start, and what is not said."""

import gc
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import keras
import pytest
import setuptools

import towers
from tests.limits import HANG_S
from tests.terminal import read_all
from tests.variants import slow
from towers import input_pipeline, parity
from towers.program import keras_settings, startup

ROOT = Path(__file__).parents[1]
# What TensorFlow 2.21 writes on a machine without a driver, and could write elsewhere.
LINES = {
    "header": "WARNING: All log messages before absl::InitializeLog() ...",
    "I": "I0000 00:00:1795251347.743295   30824 port.cc:153] oneDNN custom operations",
    "no driver": "E0000 00:00:1795251350.998367   30824 cuda_platform.cc:52] failed "
    "call to cuInit: INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)",
    "W": "W0000 00:00:1795251350.998367   30824 gpu_device.cc:2344] Cannot dlopen some",
    "E": "E0000 00:00:1795251350.998367   30824 cuda_platform.cc:52] failed call to "
    "cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    "ours": "towers: Warning: I0000",
}


def start(*command, environ=None, **options):
    """Starts Python."""
    without = {"TF_CPP_MIN_LOG_LEVEL", "NO_COLOR"}
    kept = {name: value for name, value in os.environ.items() if name not in without}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, *command],
        **{**pipes, **options},
        text=True,
        cwd=ROOT,
        env={**kept, "CUDA_VISIBLE_DEVICES": "", **(environ or {})},
    )


def run(script, **environ):
    """Runs a script; returns its exit code, output and errors."""
    process = start("-c", textwrap.dedent(script), environ=environ)
    out, err = process.communicate(timeout=HANG_S)
    return process.returncode, out, err


def stand_in(folder, script):
    """Writes a module that is imported in place of TensorFlow; returns where."""
    (folder / "tensorflow.py").write_text(textwrap.dedent(script))
    return {"PYTHONPATH": str(folder)}


# The import.


def test_tensorflow_is_imported_when_it_is_needed():
    code, out, err = run(
        """
        import sys
        import towers.program.startup, towers.parity
        print(*dir(towers))
        print(*{"tensorflow", "keras"} & set(sys.modules))
        """
    )
    assert (code, err) == (0, "")
    names, imported = out.split("\n", 1)
    assert set(towers.__all__) <= set(names.split())
    assert imported.strip() == ""


NAMES = {
    towers: "Asynchronous Auto GradientStep GradientTowers ParameterServer Parity "
    "PruneBlocks Replicated RigL Sharded Stages Trained TowerModel callbacks "
    "check_parity configure load_model multi_gpu_model numerics parallelize sparsify",
    parity: "Parity Row check_parity",
    input_pipeline: "ADVICE CACHES RECIPES ArraySource BadRecordError LocalStore Mix "
    "Pipeline Scaling Source SourceOptions Target blame_records cached "
    "columns_merged_by_float32 find_bad_record "
    "free_memory make_dataset measure_scaling normalize open_source quarantine "
    "scan_labels stage_advice unknown_size",
}


@pytest.mark.parametrize("package", NAMES)
def test_all_names_are_there(package):
    names = NAMES[package].split()
    assert package.__all__ == sorted(names)
    assert set(names) <= set(dir(package))
    for name in names:
        exec(f"from {package.__name__} import {name}")


def test_what_lists_the_names_is_installed(monkeypatch):
    monkeypatch.chdir(ROOT)
    setup = setuptools.distutils.core.run_setup("setup.py", stop_after="init")
    command = setup.get_command_obj("build_py")
    command.ensure_finalized()
    files = {package: found for package, *_, found in command.data_files}
    assert all("__init__.pyi" in files[package.__name__] for package in NAMES)


@pytest.mark.parametrize("package", NAMES)
def test_an_unknown_name_is_an_error(package):
    with pytest.raises(AttributeError, match=rf"'{package.__name__}' has no .* 'not'"):
        package.__getattr__("not")
    with pytest.raises(ImportError, match="cannot import name 'absent'"):
        exec(f"from {package.__name__} import absent")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("raise ImportError('no such file')", "no such file"),
        (
            """
            try:
                import no_such_library
            except ImportError:
                raise ImportError("Traceback: ...")
            """,
            "No module named 'no_such_library'",
        ),
    ],
)
def test_a_tensorflow_that_cannot_be_imported(tmp_path, script, reason):
    process = start("-m", "towers.train", environ=stand_in(tmp_path, script))
    _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (
        1,
        f"towers.train: TensorFlow cannot be imported ({reason}); ask python -m "
        "towers.doctor.\n",
    )


@pytest.mark.parametrize(
    ("gb", "said"),
    [
        (3, "program: Note: This process may have 3,072.0 MB of address space (ulimit"),
        (6, ""),
    ],
)
def test_too_little_address_space_is_said_before_tensorflow_aborts(tmp_path, gb, said):
    module = "class config: list_physical_devices = staticmethod(list)"
    script = f"""
        import resource
        from towers.program import startup
        resource.setrlimit(resource.RLIMIT_AS, ({gb} << 30, resource.RLIM_INFINITY))
        startup.begin("program")
    """
    code, _, err = run(script, **stand_in(tmp_path, module))
    assert code == 0
    assert err.startswith(said) and bool(err) == bool(said)


# Flags.


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("towers.train --bath_size=3", "batch_size"),
        slow("towers.train --epochs=3", "train_epochs"),
        slow("towers.train --image-size=8", "image_size"),
        ("towers.parity --lr 0.1", "learning_rate"),
        slow("towers.find_batch_size --gpus=2", "num_gpus"),
        ("towers.report runs/mine --out=page.html", "output"),
        slow("towers.doctor --logdir=runs", "model_dir"),
        ("towers.input_pipeline.convert a b --size=8", "image_size"),
        slow("towers.input_pipeline.benchmark --data=digits", "dataset"),
        ("towers.input_pipeline.service dispatcher --prt=5", "port"),
    ],
)
def test_a_wrong_flag_is_told_before_tensorflow_is_imported(tmp_path, command, meant):
    module, *flags = command.split()
    without = stand_in(tmp_path, "raise SystemExit('TensorFlow is imported')")
    process = start("-m", module, *flags, environ=without)
    _, err = process.communicate(timeout=HANG_S)
    wrong = flags[-1 if "=" in flags[-1] else 0].partition("=")[0]
    assert (process.returncode, err) == (
        1,
        f"{module}: Received {wrong}, but there is no such flag (did you mean "
        f"--{meant}?); see --help.\n",
    )


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        slow("--batch_size=x", "--batch_size=x; expected a whole number; see"),
        ("--batch_size=0", "--batch_size=0; expected at least 1"),
        slow("--dtype=fp23", "--dtype=fp23; expected one of fp32, .* mean fp32"),
        slow("--strict=maybe", "--strict=maybe; expected true or false"),
        ("--model=resnet2", "There is no model .resnet2. .did you mean resnet32"),
        slow("--optimizer=adan", "--optimizer=adan; expected an optimizer .* adam"),
        slow("--gpu_split=0", "--gpu_split=0; expected at least 1"),
        slow(
            "--learning_rate=inf",
            "--learning_rate=inf; expected a number that is finite",
        ),
        slow(
            "--eval_fraction=1",
            "--eval_fraction=1.0; expected at least 0 and less than 1",
        ),
        ("--dataset=mnist", "unknown data set 'mnist': did you mean tfds:mnist"),
        slow("--dataset=synthetic:8x8:3", "'synthetic:8x8:3' cannot be read: expected"),
        slow(
            "--dataset=csv:none/*.csv", "no file matches 'none/\\*.csv': expected files"
        ),
        slow("--eval_dataset=folder:none", "'none' is not a folder: expected one"),
        ("--clean --eval_only", "--clean and --eval_only; expected one of them"),
        ("--model_dir=/proc/run", "Cannot write to the model_dir /proc/run"),
        slow(
            "--data_dir=setup.py",
            "Cannot write to the data_dir .*/setup.py: no file can",
        ),
        slow(
            "--cache=disk:setup.py/x",
            "Cannot write to the cache .*/setup.py/x: no fi",
        ),
        ("--flagfile=none", "Unable to open flagfile: .*'none'; see --help"),
        ("cnn", "the argument 'cnn'; expected flags only"),
    ],
)
def test_a_wrong_value_is_told_before_tensorflow_is_imported(tmp_path, flag, said):
    without = stand_in(tmp_path, "raise SystemExit('TensorFlow is imported')")
    process = start("-m", "towers.train", *flag.split(), environ=without)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert re.fullmatch(rf"towers\.train: .*{said}.*\n", err)


# A reader that goes.


def test_what_nobody_reads_any_more(environ):
    receive, send = os.pipe()
    os.close(receive)
    with open(send, "w") as pipe:
        stream = startup.outlive(pipe)
        for _ in range(2):
            assert stream.write("lost\n") == 5
            stream.flush()
        print("x" * 10**6, file=stream)


def test_output_that_cannot_be_written_is_said(capfd):
    with open("/dev/full", "w") as full:
        stream = startup.outlive(full)
        for _ in range(2):
            print("lost", file=stream)
            stream.flush()
    assert capfd.readouterr().err == (
        "The output cannot be written any more (No space left on device).\n"
    )


def test_closed_streams_are_written_to_nobody(tmp_path):
    """As in a shell: `python -m towers.train >&- 2>&-`."""
    (tmp_path / "said").write_text("")
    script = f"""
        import os, sys
        for number in range(3):
            os.close(number)
        sys.stdin = sys.stdout = sys.stderr = None
        sys.__stdin__ = sys.__stdout__ = sys.__stderr__ = None
        from towers.program import startup
        def read(argv):
            sys.exit(print("lost", file=sys.stderr))
        try:
            startup.begin("x", read, sift=False)
        finally:
            open({str(tmp_path / "said")!r}, "w").write(str(sys.stdout.fileno()))
    """
    assert run(script) == (0, "", "")
    assert (tmp_path / "said").read_text() == "1"


# The user's own settings of Keras.


@pytest.fixture
def keras_json(monkeypatch, tmp_path):
    """Writes Keras's settings."""
    for name in ("KERAS_BACKEND", "KERAS_MAX_EPOCHS", "KERAS_MAX_STEPS_PER_EPOCH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    path = tmp_path / "keras.json"

    def write(text):
        path.write_text(text)
        return path

    return write


def test_settings_that_are_passed_over(keras_json, monkeypatch):
    assert keras_settings.ignored() == []
    path = keras_json('{"backend": "torch", "floatx": "float16", "epsilon": 1e-5}')
    monkeypatch.setenv("KERAS_MAX_EPOCHS", "1")
    monkeypatch.setattr(keras.config, "set_floatx", mock.Mock())
    backend, limit, floatx = keras_settings.ignored()
    assert backend.startswith(f'"backend": "torch" in {path} is ignored: ')
    assert limit.startswith("KERAS_MAX_EPOCHS=1 is ignored: ")
    assert floatx == f'"floatx": "float16" in {path} is ignored for "float32".'
    keras_settings.override()
    assert os.environ["KERAS_BACKEND"] == "tensorflow"
    assert "KERAS_MAX_EPOCHS" not in os.environ
    keras.config.set_floatx.assert_called_once_with("float32")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", r"holds \[1\]; expected Keras's settings"),
        ('{"floatx": "float8"}', '"floatx": "float8" in .*; expected float32 or'),
        ('{"image_data_format": 1}', '"image_data_format": 1 in .*; expected channels'),
        ('{"epsilon": 0}', '"epsilon": 0 in .*; expected a number such as 1e-07'),
    ],
)
def test_settings_that_keras_cannot_read(keras_json, text, said):
    keras_json(text)
    with pytest.raises(ValueError, match=rf"{said}.* correct it"):
        keras_settings.ignored()


def test_in_python_another_backend_is_an_error(tmp_path, monkeypatch):
    # Programs set it, also those that a test before has called here.
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    code, _, err = run(
        """
        import towers
        import towers.train.flags
        try:
            towers.multi_gpu_model
        except ImportError as error:
            raise SystemExit(str(error))
        """,
        KERAS_HOME=str(tmp_path),
    )
    assert (code, err) == (
        1,
        f'Received "backend": "jax" in {tmp_path}/keras.json; Towers trains with Keras '
        "on TensorFlow, so set KERAS_BACKEND=tensorflow before Keras is imported.\n",
    )


# Ctrl-C.


def test_ctrl_c_before_the_flags_are_read(tmp_path):
    """No traceback out of an import, the first of all that are not Python's own."""
    (tmp_path / "wrapt.py").write_text("import signal; signal.raise_signal(2)")
    process = start("-m", "towers.train", environ={"PYTHONPATH": str(tmp_path)})
    _, err = process.communicate(timeout=HANG_S)
    # Which is 130 for a shell.
    assert (process.returncode, err) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("towers.train", "Stopped by Ctrl-C: nothing was saved yet."),
        ("towers.parity", "Stopped by Ctrl-C."),
        slow("towers.input_pipeline.convert digits tfrecord:x", "Stopped by Ctrl-C."),
        slow("towers.input_pipeline.benchmark", "Stopped by Ctrl-C."),
        ("towers.input_pipeline.service dispatcher", "Stopped by Ctrl-C."),
    ],
)
def test_ctrl_c_while_tensorflow_is_imported(tmp_path, module, said):
    imports_for_ever = """
        print("importing", flush=True)
        while True:
            try:
                input()
            except KeyboardInterrupt:
                raise ImportError("as C code may make of it")
    """
    process = start(
        *("-m", *module.split()),
        environ=stand_in(tmp_path, imports_for_ever),
        stdin=subprocess.PIPE,
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (130, f"{module.split()[0]}: {said}\n")


@pytest.fixture
def environ(monkeypatch):
    """Keeps what `begin` sets out of other tests."""
    for name in ("TF_CPP_MIN_LOG_LEVEL", "CUDA_DEVICE_ORDER", "TF_GPU_THREAD_MODE"):
        # Set before deleted, so that what `begin` sets is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(startup, "_paused", False)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "argv", ["program"])
    before = signal.getsignal(signal.SIGINT)
    yield monkeypatch
    signal.signal(signal.SIGINT, before)
    gc.enable()


def test_ctrl_c_is_the_programs_once_it_has_begun(environ):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    startup.begin("program")
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    startup.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, print])
def test_ctrl_c_stays_with_whoever_has_it(environ, handler):
    signal.signal(signal.SIGINT, handler)
    startup.begin("program")
    startup.end()
    assert signal.getsignal(signal.SIGINT) is handler


def test_garbage_is_the_callers_unless_it_has_begun(environ):
    environ.setattr(gc, "freeze", mock.Mock())
    startup.end()
    gc.disable()
    startup.begin("program")
    startup.end()
    assert not gc.isenabled()
    gc.freeze.assert_not_called()


def test_garbage_is_collected_again(environ):
    environ.setattr(gc, "freeze", mock.Mock())
    startup.begin("program")
    assert not gc.isenabled()
    gc.freeze.assert_not_called()
    startup.end()
    assert gc.isenabled()
    gc.freeze.assert_called_once()


# TensorFlow's lines.


@pytest.mark.slow
def test_only_what_is_asked_for_is_said(tmp_path):
    """Real ones: behind the devices, there are no such pictures."""
    (tmp_path / "none").mkdir()
    command = "-m", "towers.train", f"--dataset=folder:{tmp_path}/none"
    # At the same time, so in folders of their own.
    runs = (
        start(*command, f"--model_dir={tmp_path}/quiet"),
        start(*command, f"--model_dir={tmp_path}/loud", "--verbosity=0"),
    )
    quiet, loud = (process.communicate(timeout=HANG_S)[1] for process in runs)
    assert [process.returncode for process in runs] == [1, 1]
    assert re.fullmatch(r"towers\.train: .* has no class folders.*\n", quiet)
    assert quiet in loud
    assert len(re.findall(r"^I0000", loud, re.M)) > 1


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("", {"header", "I", "no driver", "W", "E", "ours"}),
        slow("0", {"header", "I", "no driver", "W", "E", "ours"}),
        ("1", {"W", "E", "ours"}),
        slow("2", {"E", "ours"}),
        ("3", {"ours"}),
    ],
)
def test_the_level_holds_from_the_start(level, shown):
    script = f"""
        import os, sys
        from towers.program import startup
        with startup.quiet():
            for line in {list(LINES.values())}:
                os.write(2, line.encode() + b"\\n")
        print("after", file=sys.stderr)
    """
    code, _, err = run(script, TF_CPP_MIN_LOG_LEVEL=level)
    kept = [line for name, line in LINES.items() if name in shown]
    assert (code, err.splitlines()) == (0, [*kept, "after"])


def test_what_errors_say_twice_is_left_out(tmp_path):
    lines = [
        "W0000 00:00:1.1 1 op_kernel.cc:1858] OP_REQUIRES failed at sparse.cc:103",
        "W0000 00:00:1.1 1 local_rendezvous.cc:412] Local rendezvous is aborting",
        "\t [[{{node SparseSoftmaxCrossEntropyWithLogits}}]]",
        "\t [[sub_3/_2]]",
        "\t [[IteratorGetNext]]",
        "W0000 00:00:1.1 1 assert_op.cc:39] Ignoring Assert operator a/Assert",
    ]
    module = "class config: list_physical_devices = staticmethod(list)"
    script = f"""
        import os, sys
        from towers.program import startup
        startup.begin("program")
        for line in {lines} + ["W0000 a warning"]:
            os.write(2, line.encode() + b"\\n")
        print({lines[1]!r}, file=sys.stderr)
    """
    environ = stand_in(tmp_path, module)
    code, _, err = run(script, **environ)
    assert code == 0
    assert sorted(err.splitlines()) == sorted(["W0000 a warning", lines[1]])
    *_, err = run(script, **environ, TF_CPP_MIN_LOG_LEVEL="0")
    assert sorted(err.splitlines()) == sorted([*lines, "W0000 a warning", lines[1]])


@pytest.mark.parametrize(
    ("environ", "order", "threads"),
    [
        ({}, "PCI_BUS_ID", "gpu_private"),
        ({"TF_GPU_THREAD_MODE": "global"}, "PCI_BUS_ID", "global"),
        slow({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "FASTEST_FIRST", "gpu_private"),
    ],
)
def test_gpus_are_prepared_before_tensorflow_is_there(
    tmp_path, environ, order, threads
):
    module = """
        import os

        print(os.environ["CUDA_DEVICE_ORDER"], os.environ["TF_GPU_THREAD_MODE"])

        class config:
            list_physical_devices = staticmethod(list)
    """
    script = """
        from towers.program import startup
        startup.begin("program")
    """
    code, out, err = run(script, **stand_in(tmp_path, module), **environ)
    assert (code, out, err) == (0, f"{order} {threads}\n", "")


def test_the_last_words_of_a_crash_are_seen():
    code, _, err = run(
        """
        import os
        from towers.program import startup
        with startup.quiet():
            os.write(2, b"I0000 nothing\\nF0000 built for another CPU\\n")
            os.abort()
        """,
        TF_CPP_MIN_LOG_LEVEL="1",
    )
    assert (code, err) == (-signal.SIGABRT, "F0000 built for another CPU\n")


def test_without_grep_all_is_shown():
    script = """
        import os
        from towers.program import startup
        with startup.quiet():
            os.write(2, b"I0000 something\\n")
    """
    code, _, err = run(script, TF_CPP_MIN_LOG_LEVEL="1", PATH="")
    assert (code, err) == (0, "I0000 something\n")


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("", "1"),
        ("--model=cnn --verbosity=-1 --seed=3", "1"),
        ("--variable_update=auto", "1"),
        ("--verbosity=warning", "1"),
        ("--verbosity", "1"),
        ("--model=cnn --verbosity=0", None),
        ("--verbosity 1 --seed=3", None),
        ("-v=2", None),
        ("--v 0", None),
        ("--verbosity=info", None),
    ],
)
def test_verbosity(environ, flags, level):
    environ.setattr(sys, "argv", ["program", *flags.split()])
    startup.begin("program")
    assert os.environ.get("TF_CPP_MIN_LOG_LEVEL") == level


def test_a_level_of_the_users_stays(environ):
    environ.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    startup.begin("program")
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"


# Color.


@pytest.mark.parametrize(
    ("no_color", "colored"), [(None, True), slow("", True), ("1", False)]
)
def test_no_color_on_a_terminal(tmp_path, no_color, colored):
    environ = stand_in(
        tmp_path, "class config: list_physical_devices = staticmethod(list)"
    )
    if no_color is not None:
        environ["NO_COLOR"] = no_color
    script = (
        "import sys; from towers.program import startup;"
        "startup.begin('program');"
        "print(sys.stdout.isatty(), '\\x1b[1mbold\\x1b[0m \\x1b[38;5;2mgreen\\x1b[0m')"
    )
    terminal, child = pty.openpty()
    process = start("-c", script, environ=environ, stdout=child)
    os.close(child)
    shown = read_all(terminal)
    _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (0, "")
    if colored:
        assert shown == "True \x1b[1mbold\x1b[0m \x1b[38;5;2mgreen\x1b[0m\r\n"
    else:
        assert shown == "True bold green\r\n"


def test_no_color_in_a_file(tmp_path):
    environ = stand_in(
        tmp_path, "class config: list_physical_devices = staticmethod(list)"
    )
    _, out, _ = run(
        """
        from towers.program import startup
        startup.begin("program")
        print("\\x1b[1mbold\\x1b[0m")
        """,
        **environ,
    )
    assert out == "bold\n"


def test_a_progress_bar_without_color_shows_progress(monkeypatch):
    """Keras's own, on a terminal."""
    terminal, child = pty.openpty()
    with os.fdopen(child, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", startup.Plain(stream))
        bar = keras.utils.Progbar(20, interval=0)
        for step in (5, 20):
            bar.update(step, [("loss", 0.5)])
        # At its end, a terminal forgets what nobody has read. One reading may bring
        # only a part.
        print("the end", file=stream, flush=True)
        read = b""
        while b"the end" not in read:
            read += os.read(terminal, 65536)
    os.close(terminal)
    shown = read.decode()
    assert "\x1b" not in shown
    assert re.search(r" 5/20 ━{5}─{15} \d+s .*loss: 0\.5000", shown)
    assert re.search(r"20/20 ━{20} \d+s .*loss: 0\.5000", shown)
