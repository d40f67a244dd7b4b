"""What a program of ours does before it imports anything: `towers` imports this first.

It is not for programs of the user's that import `towers`.
"""

import os
import sys


def _is_ours() -> bool:
    """Tells whether `python -m towers.X` or the command `towers` begins."""
    if sys.argv[:1] == ["-m"]:
        name = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
        return name.partition(".")[0] == "towers"
    return os.path.basename(sys.argv[0] if sys.argv else "") == "towers"


if _is_ours():
    if sys.argv[0] == "-m" and not sys.flags.safe_path:
        # Python looks into the current folder first, where users have files of all
        # names, such as typing.py or absl.py: from now on, it does so last.
        sys.path.append(sys.path.pop(0))

    import signal

    from towers.processes import signals

    # Until `startup.begin` has a sentence for it, Ctrl-C ends the process in silence.
    # Jobs that a shell runs in the background ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signals.refuse_to_save()
