"""Times our input pipeline against its peers, alternately, the pipeline alone.

Each contender is a process of its own. In each round, every one reads in turn while the
others wait; so a drift of the machine's speed meets all of them. Each round starts
reading anew, and its first batches are not timed. Reported are medians, and the median
over rounds of the first contender's speed over that of each. Nothing else may run
meanwhile.

    python scripts/bench_input.py
    python scripts/bench_input.py --work=photos --contenders=ours,tuned,dali,c
    python scripts/bench_input.py --work=whole --contenders=ours,naive,naive_cast_last

Works (--work); the data are made on first use, of photographs that are inside
scikit-learn and scikit-image:

    photos      JPEGs of about 500x375 in TFRecords or a folder: random resized crops of
                224x224, flipped or not, batch 64
    whole       the same JPEGs, each as a whole to 224x224: the default recipe
    small       32x32 pixels in TFRecords: padded by 4, cropped, flipped or not,
                batch 256
    arrays      the same of arrays in memory

Contenders (--contenders); what some need, pip install -e '.[bench]' brings:

    ours, ours_deterministic    make_dataset, deterministic=False and True, of what
                                `cached` keeps in memory, as by default in training
    ours_stream, ours_stream_deterministic
                                the same with --cache=none: files in every epoch
    naive, naive_cast_last      tf.data as in a tutorial, float32 from the start, or
                                only what is left after crop and resize
    tuned, tuned_float          tf.data in parallel, each example by itself; uint8 and
                                float32
    keras                       image_dataset_from_directory and layers; photos, float32
    dali                        NVIDIA DALI on the CPU; photos (needs nvidia-dali)
    grain                       grain with simplejpeg and cv2, 2 processes; photos
    torchvision                 DataLoader, transforms.v2, 2 processes; photos
    c                           how fast it could be: libjpeg-turbo in C, 2 processes;
                                photos (needs cc and libjpeg-turbo's headers)

Time to the first batch is without imports. Memory is the sum over a contender's
processes, in which what they share counts more than once.
"""

import contextlib
import functools
import importlib.metadata
import pathlib
import sys

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.bench import report
from scripts.bench.contenders import check_flags
from scripts.input_bench import data, results
from scripts.input_bench.contenders import CONTENDERS
from scripts.input_bench.worker import Job
from scripts.input_bench.works import WORKS
from scripts.race import ROOT, take_turns

FLAGS = flags.FLAGS
COLUMNS = (
    "work",
    "contender",
    "examples/s",
    "ours / theirs",
    "first batch s",
    "peak MB",
    "CPU ms an example",
)
PACKAGES = "nvidia-dali-cuda120", "grain", "torchvision"

flags.DEFINE_list("work", list(WORKS), "What to read; see above.")
flags.DEFINE_list("contenders", list(CONTENDERS), "Who reads; see above.")
flags.DEFINE_integer("rounds", 9, "Rounds.", lower_bound=1)
flags.DEFINE_integer(
    "examples", None, "Timed examples of a round; the work's own.", lower_bound=1
)
flags.DEFINE_integer(
    "warmup",
    None,
    "Examples read before those of each round; the work's own.",
    lower_bound=0,
)
flags.DEFINE_string(
    "data_dir", str(ROOT / "build" / "bench_input"), "Where the data go."
)
flags.DEFINE_string("json", None, "File to append a JSON line for each result to.")


def main(argv):
    """Runs the benchmark."""
    try:
        check_flags(argv, FLAGS, work=WORKS, contenders=CONTENDERS)
        if pathlib.Path(FLAGS.data_dir).is_file():
            raise ValueError(f"--data_dir is {FLAGS.data_dir}, a file; give a folder.")
        folder = data.make(FLAGS.data_dir)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    machine = ", ".join([report.machine(), *versions()])
    measured = (result for work in FLAGS.work for result in compare(work, folder))
    if not report.show(measured, COLUMNS, cells, machine, FLAGS.json):
        sys.exit("No contender could read.")


def versions():
    """Yields the versions of peers that `report.machine` does not know."""
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"


def compare(work, folder):
    """Times all contenders on one kind of work.

    Args:
        work: The work.
        folder: Where the data are.

    Returns:
        A dict for each contender that could read, as from `results.summary`.
    """
    usual = WORKS[work]
    jobs = [
        Job(
            contender=name,
            work=work,
            folder=str(folder),
            warmup=usual.warmup if FLAGS.warmup is None else FLAGS.warmup,
            examples=FLAGS.examples or usual.examples,
        )
        for name in FLAGS.contenders
    ]

    def failed(job, reason):
        print(f"{job.contender} is left out of {work}: {reason}", file=sys.stderr)

    start = functools.partial(results.start, verbose=FLAGS.verbosity > 0)
    times = take_turns(jobs, start, FLAGS.rounds, failed)
    reference = times[jobs[0]].rounds if jobs[0] in times else []
    return [
        results.summary(job, found.starts[0], found.rounds, reference)
        for job, found in times.items()
    ]


def cells(result):
    """Returns the cells of a result, for `COLUMNS`."""
    contender = CONTENDERS[result["contender"]]
    return [
        result["work"],
        f"{contender.label}, {contender.dtype}",
        f"{result['examples_per_sec']:,.0f}",
        None if result["ratio"] is None else f"{result['ratio']:.2f}",
        f"{result['first_batch_s']:.2f}",
        f"{result['peak_mb']:,.0f}",
        f"{result['cpu_ms']:.3f}",
    ]


if __name__ == "__main__":
    app.run(main)
