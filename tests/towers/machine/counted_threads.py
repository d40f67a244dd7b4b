"""Trains by the flags of this process; prints the most threads that it had, as JSON."""

import contextlib
import json
import re
import runpy
import sys
import threading
from pathlib import Path


def main():
    most, ended = [0], threading.Event()

    def look():
        while not ended.wait(0.1):
            status = Path("/proc/self/status").read_text()
            count = int(re.search(r"^Threads:\s+(\d+)", status, re.MULTILINE)[1])
            most[0] = max(most[0], count)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with contextlib.suppress(SystemExit):
            sys.argv[0] = "towers.train"
            runpy.run_module("towers.train", run_name="__main__", alter_sys=True)
    finally:
        ended.set()
        thread.join()
    print(json.dumps({"threads": most[0]}), flush=True)


if __name__ == "__main__":
    main()
