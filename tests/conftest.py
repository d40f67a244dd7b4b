"""Makes four logical CPUs, the towers of all tests in this process."""

import gc
import logging
import os
import shlex
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is in a shell's background jobs, and would be in what tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# What is said of slow work depends on how busy the machine is.
os.environ.setdefault("TOWERS_PROGRESS", "0")
# Nothing is written to the user's folder, and nothing is read there.
os.environ["TOWERS_XLA_CACHE"] = "false"

import pytest

from tests import variants


def pytest_configure(config):
    """Makes the devices, but not where workers of pytest-xdist run the tests."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("tx", None)
    if runs_tests or config.option.collectonly:
        _make_devices()


def _make_devices():
    # It takes seconds, in which the workers could begin.
    import tensorflow as tf

    # Counts of GPUs mean logical CPUs here; tests of real ones run scripts.
    tf.config.set_visible_devices([], "GPU")
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration() for _ in range(4)],
    )


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Starts every test from the same seed, names and types."""
    import keras

    keras.backend.clear_session()
    # TensorFlow keeps the graphs of all tests; looking through them again in each
    # garbage collection would take most of the time.
    gc.freeze()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(1)


@pytest.fixture(autouse=True)
def _caplog_hears_towers(caplog):
    # Not by `propagate`: other handlers of the root would write the lines again.
    logger = logging.getLogger("towers")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


def pytest_addoption(parser):
    """Adds what CI has no time without."""
    text = "Run one in so many tests: different ones with each commit."
    parser.addoption("--one-in", type=int, default=1, help=text)


def pytest_report_header():
    """Says which variants run."""
    return f"variants: those of TOWERS_TURN={variants.TURN}"


def pytest_terminal_summary(terminalreporter):
    """Says how to repeat what failed."""
    stats = terminalreporter.stats
    failed = [*stats.get("failed", ()), *stats.get("error", ())]
    if not failed:
        return
    names = "TOWERS_TURN", "TOWERS_EXACT_ALL", "TF_ENABLE_ONEDNN_OPTS"
    given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    terminalreporter.section("run again")
    for report in {report.nodeid: report for report in failed}.values():
        command = shlex.join([sys.executable, "-m", "pytest", report.nodeid])
        terminalreporter.line(" ".join([*given, command]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Chooses among the tests, before pytest does so by their marks."""
    import tensorflow as tf

    variants.mark_slow(items)
    if (n := config.getoption("--one-in")) > 1:
        left_out = [item for item in items if not variants.one_in(n, item.nodeid)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if variants.one_in(n, item.nodeid)]
    on_cpu = "TOWERS_GPU_TESTS_ON_CPU" in os.environ
    if on_cpu or tf.config.list_physical_devices("GPU"):
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))
