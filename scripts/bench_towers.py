"""Times towers against their peers, alternately, on the same machine.

Each contender is a process of its own. They start one after the other, for the time to
the end of the first step, and warm up. Then, in each round, every one trains in turn
while the others wait; so a drift of the machine's speed meets all of them. Reported are
medians, and the median over rounds of the ratio to the first contender. Nothing else
may run meanwhile.

    python scripts/bench_towers.py
    python scripts/bench_towers.py --work=mlp --contenders=towers@10,one_device@10
    python scripts/bench_towers.py --scaling=1,2,4,8 --plot=scaling.png

Contenders (--contenders); what some need, pip install -e '.[bench]' brings:

    towers                      what --variable_update=auto does
    towers:BUILDER              variable_update=BUILDER of multi_gpu_model
    one_device                  Keras fit, one device, the whole batch
    mirrored, mirrored_loop     MirroredStrategy: Keras fit; a loop by hand, no metrics
    tower_loop                  a loop with towers.GradientTowers, no metrics, on mlp
                                and resnet20; tower_loop:replicated with copies
    loop_by_hand                the same loop with towers by hand, in one tf.function
    hosts, hosts:BUILDER        towers on hosts of one tower each, in processes
    mpi_hosts, mpi_hosts:BUILDER  the same, connected by MPI (needs mpi4py and mpirun)
    multi_worker_loop           MultiWorkerMirroredStrategy in processes: a loop by
                                hand, no metrics
    jax                         Keras fit on JAX, DataParallel (needs jax)
    ddp                         PyTorch DistributedDataParallel, a loop by hand, no
                                metrics, on mlp, resnet20 and transformer_lm (needs
                                torch)
    pipeline:M                  towers: the devices are stages of one, with M
                                micro-batches
    micro_batches:M             towers: one device, with M micro-batches
    torch_pipeline:M            torch.distributed.pipelining, 1F1B, on transformer_lm
                                (needs torch)
    tf_cnn:MODE                 tf_cnn_benchmarks on input that stays on the devices, no
                                metrics, not on embedding; parameter_server, replicated
                                or independent, which never synchronizes (needs
                                tf_keras and --tf_cnn_dir)

Behind towers, /auto, /rows or /columns divides embedding tables over the devices, as in
towers:parameter_server/rows; towers:replicated/state has optimizer state in parts.
Behind towers and one_device, +xla compiles with XLA, @N
trains N steps a call, as in towers:parameter_server+xla@10. The first step is then the
first N. At the end, ?NAME=VALUE&... gives towers further arguments of multi_gpu_model
or options of the way, as in 'towers:replicated?all_reduce=cpu', or jit_compile=auto,
which compiles the update if the variables are on a GPU, or inter_op=N, the number of
operations that TensorFlow runs at once.

With fewer GPUs than towers, each GPU is split into logical ones, of
--gpu_memory_limit_mb each. One device is then a whole GPU.
"""

import functools
import importlib.util
import itertools
import math
import os
import pathlib
import sys
import time

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts import race
from scripts.bench import contenders, report, results
from scripts.bench.worker import Job
from scripts.bench.works import WORKS

FLAGS = flags.FLAGS
_BEGUN_S = time.monotonic()

flags.DEFINE_list(
    "work",
    ["mlp", "resnet20", "embedding"],
    f"What to train: {', '.join(WORKS)}. dcgan and wgan_gp have a train_step of their "
    "own; towers, one_device and mirrored train them. resnet50 is for the first step "
    "and memory, resnet50_224 for GPUs.",
)
flags.DEFINE_list(
    "contenders", ["towers", "mirrored", "one_device"], "Who trains; see above."
)
flags.DEFINE_integer("towers", 2, "Towers, or replicas.", lower_bound=1)
flags.DEFINE_integer("rounds", 9, "Rounds.", lower_bound=1)
flags.DEFINE_integer(
    "fresh_starts",
    1,
    "How many times each contender is started, for the first step and memory.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "warmup", None, "Steps before the first round; the work's own.", lower_bound=0
)
flags.DEFINE_integer(
    "steps", None, "Timed steps of a round; the work's own.", lower_bound=1
)
flags.DEFINE_integer(
    "gpu_memory_limit_mb",
    4096,
    "With fewer GPUs than towers: memory of each logical GPU, in MB.",
    lower_bound=1,
)
flags.DEFINE_bool(
    "start_together",
    False,
    "Start contenders without XLA at once, which saves time. Their first step is then "
    "slower.",
)
flags.DEFINE_integer(
    "start_seconds",
    None,
    "Most seconds in which a contender may get warm; who takes longer is left out.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "max_seconds",
    None,
    "Seconds of this program after which no further round begins.",
    lower_bound=1,
)
flags.DEFINE_list("scaling", None, "Numbers of towers to compare, such as 1,2,4,8.")
flags.DEFINE_string("plot", None, "PNG file for the plot of --scaling (matplotlib).")
flags.DEFINE_string("json", None, "File to append a JSON line for each result to.")
flags.DEFINE_string(
    "tf_cnn_dir",
    None,
    "scripts/tf_cnn_benchmarks of a checkout of tensorflow/benchmarks.",
)


def main(argv):
    """Runs the benchmark."""
    try:
        contenders.check_flags(argv, FLAGS, work=WORKS, contenders=None)
        counts = check_counts()
    except ValueError as error:
        sys.exit(str(error))
    measured = (
        result
        for work, towers in itertools.product(FLAGS.work, counts)
        for result in compare(work, towers)
    )
    shown = report.show(
        measured, report.COLUMNS, report.cells, report.machine(), FLAGS.json
    )
    if not shown:
        sys.exit("No contender could train.")
    if FLAGS.scaling:
        rows = report.scaling(shown)
        print("", *report.scaling_table(rows), sep="\n")
        if FLAGS.plot:
            report.plot(rows, FLAGS.plot)


def check_counts() -> list[int]:
    """Checks the other flags before anything starts.

    Returns:
        The numbers of towers to train on.

    Raises:
        ValueError: If a flag is wrong.
    """
    for name in FLAGS.contenders:
        contenders.parse(name)
    if FLAGS.plot and not FLAGS.scaling:
        raise ValueError("--plot is drawn of --scaling; give both, or neither.")
    if FLAGS.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib; {race.PACKAGES} brings it.")
    if not FLAGS.scaling:
        return [FLAGS.towers]
    if not all(count.isdecimal() and int(count) for count in FLAGS.scaling):
        raise ValueError(
            "--scaling has to be numbers of towers, such as 1,2,4,8; it is "
            f"{','.join(FLAGS.scaling)!r}."
        )
    return sorted({int(count) for count in FLAGS.scaling})


def compare(work, towers):
    """Times all contenders on one kind of work.

    Args:
        work: The work.
        towers: How many towers.

    Returns:
        A dict for each contender that could train, as from `results.summary`.
    """
    usual = WORKS[work]
    jobs = [
        Job(
            contender=name,
            work=work,
            towers=towers,
            warmup=usual.warmup if FLAGS.warmup is None else FLAGS.warmup,
            steps=FLAGS.steps or usual.steps,
            checkout=FLAGS.tf_cnn_dir and os.path.abspath(FLAGS.tf_cnn_dir),
            gpu_memory_limit_mb=FLAGS.gpu_memory_limit_mb,
        )
        for name in FLAGS.contenders
    ]

    def failed(job, reason):
        print(
            f"{job.contender} is left out of {work}, {towers} towers: {reason}",
            file=sys.stderr,
        )

    times = race.take_turns(
        jobs,
        functools.partial(
            results.start, verbose=FLAGS.verbosity > 0, limit_s=FLAGS.start_seconds
        ),
        FLAGS.rounds,
        failed,
        FLAGS.fresh_starts,
        # XLA tries kernels while it compiles, beside nobody.
        lambda job: FLAGS.start_together and not job.parsed.may_compile,
        _BEGUN_S + (FLAGS.max_seconds or math.inf),
    )
    reference = times[jobs[0]].rounds if jobs[0] in times else []
    return [
        results.summary(job, measured.starts, measured.rounds, reference)
        for job, measured in times.items()
    ]


if __name__ == "__main__":
    app.run(main)
