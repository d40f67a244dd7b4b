"""TFDS without a network: a sentence soon, and an end at once."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.limits import HANG_S
from towers import input_pipeline
from towers.input_pipeline.sources.tfds import network, tfds_source


class TowersFar(tfds.core.GeneratorBasedBuilder):
    """A set that lies where nobody answers."""

    VERSION = tfds.core.Version("1.0.0")
    url = ""

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(2, 2, 1), dtype=np.uint8),
            "label": tfds.features.ClassLabel(num_classes=2),
        }
        features = tfds.features.FeaturesDict(features)
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        dl_manager.download(self.url)

    def _generate_examples(self):
        yield


@pytest.fixture
def refused():
    """A port that nobody listens to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_no_network_is_one_sentence(tmp_path, monkeypatch, refused, caplog):
    # Where the library tries again, it would wait for minutes.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    builder = TowersFar(data_dir=tmp_path)
    builder.url = f"http://127.0.0.1:{refused}/a.zip"
    source = tfds_source.TFDSSource(builder, "tfds:far")
    with pytest.raises(
        ValueError, match=r"tfds:far is not in .* yet, and can"
    ) as caught:
        source.prepare()
    said = str(caught.value)
    assert f"downloaded: no connection to 127.0.0.1:{refused} (Conn" in said
    assert said.endswith(
        "; connect this machine to the network, or copy that folder "
        "from a machine that has it"
    )
    assert "Retrying" not in caplog.text


def test_a_host_that_does_not_answer_is_waited_for_once(monkeypatch):
    asked, end = [], threading.Event()

    def never(place, timeout):
        asked.append(place)
        end.wait()
        raise OSError

    monkeypatch.setattr(network.socket, "create_connection", never)
    monkeypatch.setattr(network, "_SECONDS", 0.01)
    hosts = network._Hosts()
    try:
        said = {hosts.ask(f"https://far.example/{name}") for name in "ab"}
    finally:
        end.set()
    assert said == {"no connection to far.example:443 (no answer within 0.01 s)"}
    assert asked == [("far.example", 443)]


@pytest.mark.slow
def test_sigterm_ends_a_download_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "towers.train", "--dataset=tfds:mnist"]
            + [f"--data_dir={tmp_path}", f"--model_dir={tmp_path / 'run'}"],
            env={**os.environ, "HTTPS_PROXY": address, "https_proxy": address},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            # The first one asks whether there is anybody; nobody answers the others.
            connections = [proxy.accept() for _ in range(3)]
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
            for connection, _ in connections:
                connection.close()
    assert process.returncode == 143
    assert said.endswith("towers.train: Stopped by SIGTERM: nothing was saved yet.\n")
    assert "Traceback" not in said


def test_no_bars_where_nobody_watches(tmp_path, monkeypatch, capsys):
    """tqdm has been imported by now, and looks at its variable no more."""
    tfds.enable_progress_bar()
    monkeypatch.setenv("TQDM_DISABLE", "1")
    try:
        input_pipeline.open_source("digits", data_dir=tmp_path).prepare()
    finally:
        tfds.enable_progress_bar()
    assert "examples/s" not in capsys.readouterr().err
