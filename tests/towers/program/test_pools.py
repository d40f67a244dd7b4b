"""A program exits, whatever has ended the processes of its pools."""

import subprocess
import sys

from tests.limits import HANG_S

_KILLED = """
import multiprocessing, os, signal, sys, time
from towers.program import forks

forks._SECONDS = 0.1
pool = multiprocessing.get_context("fork").Pool(2)
pool.map(abs, range(4))
lock = pool._inqueue._rlock
# Until one waits for work, which it does with the lock.
while lock.acquire(block=False):
    lock.release()
    time.sleep(0.01)
# The pool puts new ones in their places.
workers = [*pool._pool]
for process in workers:
    os.kill(process.pid, signal.SIGTERM)
for process in workers:
    process.join()
forks.end_pools_at_exit()
sys.exit(143)
"""


def test_a_pool_whose_lock_is_lost_does_not_hang():
    command = [sys.executable, "-c", _KILLED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 143
    assert not done.stderr
