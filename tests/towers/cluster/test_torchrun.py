"""Two processes that train together by the variables that torchrun sets."""

import concurrent.futures

from tests import warm
from towers.cluster import addresses


def test_two_processes_train(tmp_path):
    with addresses.held_port("127.0.0.1") as free:
        port = free.getsockname()[1]
    environ = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        # torchrun listens here itself, so that the hosts meet at the next port.
        "MASTER_PORT": str(port - 1),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TOWERS_TOKEN": "a secret of all hosts",
    }
    flags = [
        *("--dataset=synthetic:8x8x1:10:64", "--model=mlp", "--num_gpus=1"),
        *("--train_epochs=1", f"--model_dir={tmp_path}"),
    ]

    def host(rank):
        place = {**environ, "RANK": str(rank)}
        return warm.run("towers.train", *flags, environ=place)

    with concurrent.futures.ThreadPoolExecutor(2) as every:
        ended = [*every.map(host, range(2))]
    assert [done.returncode for done in ended] == [0, 0], ended
    first, second = (done.stdout for done in ended)
    assert "2 hosts: host 0 (" in first
    # Only the first host writes into the folder.
    assert str(tmp_path) in first and str(tmp_path) not in second
    assert (tmp_path / "summary.json").exists()
    assert "1 step on 2 towers." in first and "1 step on 2 towers." in second
