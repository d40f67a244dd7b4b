"""Each `World` does what the protocol says; see `worlds.py`."""

import pytest

from tests import hosts
from tests.towers.collectives import worlds
from towers.collectives.joined_hosts import this_host
from towers.collectives.world import ALONE


@pytest.mark.parametrize("check", worlds.CHECKS)
def test_a_host_alone(check, tmp_path):
    assert this_host() is ALONE
    check(ALONE, str(tmp_path))


@pytest.mark.parametrize("count", [2, 3])
def test_hosts_that_are_connected(count, tmp_path):
    hosts.run("tests.towers.collectives.worlds", [1] * count, tmp_path)
