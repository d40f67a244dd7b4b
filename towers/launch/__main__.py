"""Starts the hosts of a run, all on this machine or one on each, and watches them.

    python -m towers.launch --hosts=2 -- --model=resnet20 --num_gpus=1
    python -m towers.launch --hosts=2 -- my_script.py --its_flag=1
    python -m towers.launch --hosts=2:4 -- --model=resnet20
    python -m towers.launch --hosts=4 --host_rank=1 --coordinator=node0:8476 -- ...

What follows -- are flags of towers.train, a Python file or -m and a module, each with
arguments, or a command. If one host fails, all end, and --max_restarts allows a new
start from the last checkpoint. With a range of hosts, the others go on without it, and
it starts again. With --host_rank, each machine runs one launcher; set
TOWERS_TOKEN to the same secret on all of them. With --launcher=ray, Ray starts the
hosts on the nodes of its cluster.
Exit codes: 0 done; 75 another host failed; 130 stopped by Ctrl-C; 143 by SIGTERM; else
that of the host that failed first, with 128 and its number for a signal. With a range,
0 if any host ends with 0, and failures count after which no others have gone on.
"""

import os
import sys
from collections.abc import Sequence

from towers.launch import arguments, supervisor
from towers.processes import signals
from towers.program.commands import fail

_PROGRAM = "towers.launch"


def main(argv: Sequence[str]) -> int:
    """Starts the hosts, and returns the exit code once all have ended."""
    signals.raise_at_ctrl_c()
    try:
        options = arguments.read(argv, __doc__)
        if options.launcher == "ray":
            from towers.launch.on_ray import driver  # imports Ray

            return driver.run(options)
        return supervisor.run(options, os.environ)
    except KeyboardInterrupt:
        return 130  # before there was anything to stop
    except (ValueError, OSError) as error:
        return fail(error, _PROGRAM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
