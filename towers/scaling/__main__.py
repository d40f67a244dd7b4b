"""Measures how training scales with the number of towers, and says how many pay.

    python -m towers.scaling --model=resnet20 --dataset=tfds:cifar10 --num_gpus=4

The flags are those of towers.train. It trains for some seconds on the run's own data
with 1, 2, ... --num_gpus towers, each time in a process of its own. By default, it
tries up to all GPUs, or up to as many logical CPUs as there are cores. The global batch
stays the same. Where towers take unequally long, it tries uneven --split_ratios, too.
Nothing is saved.
Exit codes: 0 done; 1 error; 130 stopped by Ctrl-C; 143 by SIGTERM.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.program import startup
    from towers.scaling import scaling_flags

    _settings = startup.begin(
        "towers.scaling", lambda argv: scaling_flags.read(argv, __doc__)
    )

import functools
import json
import sys
import tempfile

import tensorflow as tf

from towers.machine import limits
from towers.program import ending, startup, words
from towers.program.commands import fail
from towers.scaling import measure
from towers.scaling.measure import Trial
from towers.scaling.network import Network
from towers.scaling.report import ScalingReport
from towers.scaling.scaling_flags import Scaling
from towers.train.parts.devices import with_free_gpus

_PROGRAM = "towers.scaling"


def scale(settings: Scaling) -> int:
    """Measures, says on stderr how far it is, and shows what was found.

    Returns:
        The exit code.

    Raises:
        ValueError: If any input is bad, or nothing fits.
    """
    settings = with_free_gpus(settings)
    tried: list[Trial] = []
    code = 0
    with tempfile.TemporaryDirectory(prefix="towers-") as folder:
        run = functools.partial(measure.run, settings, folder)
        try:
            for each in measure.trials(counts(settings), settings.rounds, run):
                tried.append(each)
                say(each)
        except KeyboardInterrupt as stop:
            cause, code = ending.cause_of(stop)
            fail(f"Stopped by {cause}.", _PROGRAM)
    if not any(each.fits for each in tried):
        if code:
            return code
        raise ValueError(
            f"No number of towers fits ({tried[-1].why}); allow more memory, or take a "
            "smaller --batch_size."
        )
    report = ScalingReport(
        tried,
        settings.batch_size,
        settings.more_hosts,
        Network(settings.network_delay_ms, settings.network_gbit),
        stopped=bool(code),
        devices_flag=settings.devices_flag,
    )
    print(json.dumps(report.as_dict()) if settings.json else report)
    if settings.plot:
        report.plot(settings.plot)
    return code


def counts(settings: Scaling) -> list[int]:
    """Returns the numbers of towers to try, in rising order.

    Raises:
        ValueError: There are too few devices for one tower, or for those asked for.
    """
    gpus = len(tf.config.list_physical_devices("GPU"))
    asked = len(settings.gpu_indices or ()) or settings.num_gpus
    devices = asked or gpus or limits.cpu_count()
    if gpus and (settings.num_gpus or 0) > gpus:
        raise ValueError(
            f"Received {settings.as_flag('num_gpus')}, but TensorFlow sees "
            f"{words.count(gpus, 'GPU')}; expected at most {gpus}."
        )
    most = devices // settings.stages
    if not most:
        raise ValueError(
            f"Received {settings.as_flag('stages')} for "
            f"{words.count(devices, 'device')}; expected a device for each stage, so "
            f"give --num_gpus={settings.stages} or more."
        )
    # A tower without an example has nothing to do.
    return [*range(1, min(most, settings.batch_size) + 1)]


def say(trial: Trial) -> None:
    """Says on stderr what came of some towers, since all of them take minutes."""
    found = f"does not fit ({trial.why})"
    if trial.fits:
        found = f"{trial.examples_per_sec:,.1f} examples/sec"
    name = words.count(trial.count, "tower")
    if not trial.is_even:
        name += f" ({':'.join(map(str, trial.split_ratios))})"
    print(f"{_PROGRAM}: {name}: {found}", file=sys.stderr)


if __name__ == "__main__":
    ending.stop_at_sigterm()  # which ends the process that trains, too
    startup.leave(ending.run(_PROGRAM, lambda: scale(_settings)))
