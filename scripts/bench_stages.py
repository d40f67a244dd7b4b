"""Measures what stages of towers hold, and how long they wait, of a language model.

For each schedule and number of micro-batches: the share of the time in which stages
wait, beside that of a pipeline of equal stages, (S - 1) / (M + S - 1); the share in
which their threads run operations, by TensorFlow's profiler in two more steps, so that
the rest of a stage's work is time between operations; and the bytes of
activations that the fullest stage keeps, as the step's own graph tells. Then the bytes
of weights and optimizer slots on each device, and of the fullest one relative to an
equal part, beside those of the best division into whole layers, of all that there are.
Nothing else may run meanwhile.

    python scripts/bench_stages.py
    python scripts/bench_stages.py --stages=4 --micro_batches=4,8
    python scripts/bench_stages.py --work=byte_lm_8 --examples=64
    python scripts/bench_stages.py --stages=4 --micro_batches=4 --shard_embeddings=auto
"""

import glob
import itertools
import os
import tempfile

from absl import app, flags
from bench import works

FLAGS = flags.FLAGS

flags.DEFINE_enum(
    "work",
    "transformer_lm",
    [name for name, work in works.WORKS.items() if work.layers],
    "The language model; see bench/works.py.",
)
flags.DEFINE_integer("stages", 2, "Stages of the tower.", lower_bound=2)
flags.DEFINE_list("micro_batches", ["1", "2", "4", "8"], "Numbers of micro-batches.")
flags.DEFINE_list("schedules", ["gpipe", "1f1b"], "Schedules.")
flags.DEFINE_integer("examples", 16, "Examples of a batch.", lower_bound=1)
flags.DEFINE_enum(
    "shard_embeddings", "none", ["none", "auto", "rows", "columns"], "Tables."
)
flags.DEFINE_integer("steps", 8, "Steps to measure.", lower_bound=1)


def main(argv):
    """Runs the benchmark."""
    del argv
    import keras

    from towers import Stages, devices, multi_gpu_model

    placed = devices.configure(FLAGS.stages)
    print(
        "| schedule | M | ms a step | stages wait | formula | operations run | "
        "fullest stage keeps |"
    )
    print("|---|---|---|---|---|---|---|")
    for schedule, count in itertools.product(FLAGS.schedules, FLAGS.micro_batches):
        keras.utils.clear_session()
        model = works.build(FLAGS.work)
        parallel = multi_gpu_model(
            model,
            placed.towers,
            stages=Stages(FLAGS.stages, schedule=schedule),
            micro_batches=int(count),
            shard_embeddings=FLAGS.shard_embeddings,
        )
        parallel.compile("adam", works.loss(), jit_compile=False)
        measure(parallel, schedule, int(count))
    print()
    hold(model, parallel.builder.plan.pipeline)


def measure(parallel, schedule, count):
    """Prints how long stages wait, and what they keep."""
    import tensorflow as tf

    from towers.monitoring.step_time import StepTime

    per_tower = works.WORKS[FLAGS.work].examples
    x, y = works.batch(FLAGS.work, -(-FLAGS.examples // per_tower))
    batch = x[: FLAGS.examples], y[: FLAGS.examples]
    data = tf.data.Dataset.from_tensors(batch).repeat()
    times = StepTime(warmup_steps=3)
    parallel.fit(data, steps_per_epoch=3 + FLAGS.steps, verbose=0, callbacks=[times])
    busy = times.split.stages_busy
    waits = 1 - sum(busy) / len(busy)
    formula = (FLAGS.stages - 1) / (count + FLAGS.stages - 1)
    kept_mb = max(parallel.builder.plan.pipeline.placement.kept) / 2**20
    step_ms = sum(times.split.parts_ms.values())
    print(
        f"| {schedule} | {count} | {step_ms:,.0f} | {waits:.0%} | {formula:.0%} | "
        f"{share_of_operations(parallel, data):.0%} | {kept_mb:,.1f} MB |"
    )


def share_of_operations(parallel, data):
    """Profiles two steps.

    Returns:
        The time of operations, relative to that of as many threads as there are stages.
    """
    import tensorflow as tf

    from towers.keras_adapter.runtime import XSpace

    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        parallel.fit(data, steps_per_epoch=2, verbose=0)
        tf.profiler.experimental.stop()
        (path,) = glob.glob(os.path.join(folder, "plugins/profile/*/*.xplane.pb"))
        with open(path, "rb") as file:
            space = XSpace.FromString(file.read())
    begun, ended, run = [], [], 0
    for plane in space.planes:
        names = {key: each.name for key, each in plane.event_metadata.items()}
        for line in plane.lines:
            spans = [
                (line.timestamp_ns * 1000 + event.offset_ps, event.duration_ps)
                for event in line.events
                # An operation's name, and its type.
                if line.name.startswith("tf_Compute")
                and ":" in names[event.metadata_id]
            ]
            end = 0
            for begin, duration in sorted(spans):
                # What runs within another counts once.
                run += max(0, begin + duration - max(begin, end))
                end = max(end, begin + duration)
                begun.append(begin)
                ended.append(end)
    return run / (FLAGS.stages * (max(ended) - min(begun)))


def hold(model, pipeline):
    """Prints the bytes of weights and slots on each device, and the least possible."""
    from towers.layers import tables

    found = tables.bytes_by_device(model)
    each = {device: f"{n / 2**20:.1f} MB" for device, n in found.items()}
    ratio = max(found.values()) * pipeline.stages / sum(found.values())
    print(
        f"On each device: {each}; the fullest has {ratio:.3f}/{pipeline.stages} of all"
    )
    print(f"best of all divisions: {best(model, pipeline) / 2**20:.1f} MB")


def best(model, pipeline):
    """The bytes of the fullest stage of the best division into whole layers."""
    from towers.layers.pipeline import weighted

    # Adam has two slots for each weight.
    sizes = sorted((12 * x.count_params() for x in weighted(model)), reverse=True)
    least, loads = [sum(sizes)], [0] * pipeline.stages
    bound = max(sizes[0], sum(sizes) / pipeline.stages)

    def put(k):
        if least[0] <= bound:
            return
        if k == len(sizes):
            least[0] = min(least[0], max(loads))
            return
        for stage in sorted(range(pipeline.stages), key=loads.__getitem__):
            if loads[stage] + sizes[k] < least[0]:
                loads[stage] += sizes[k]
                put(k + 1)
                loads[stage] -= sizes[k]
            if loads[stage] == 0:
                break

    put(0)
    return least[0]


if __name__ == "__main__":
    app.run(main)
