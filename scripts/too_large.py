"""Shows a model that is too large for one device, and not for several.

A device gets a budget of bytes: a share of what the language model takes to be trained
on one, in micro-batches. For one device and for stages on several, the bytes of
weights, gradients and optimizer slots are counted, and those of activations that are
kept for the way back, from the graph of a tower. What an operation needs while it
computes is not counted. Then the model trains on the most devices, and a line says
how many bytes of variables each of them has.

    python scripts/too_large.py
    python scripts/too_large.py --stages=1,2,4,8 --budget=0.25 --recompute=stage
"""

import dataclasses

from absl import app, flags
from bench import works

FLAGS = flags.FLAGS

flags.DEFINE_list("stages", ["1", "2", "4"], "Numbers of devices to count for.")
flags.DEFINE_integer("micro_batches", 8, "Of a batch.", lower_bound=1)
flags.DEFINE_integer("examples", 8, "Examples of a batch.", lower_bound=1)
flags.DEFINE_integer("layers", 8, "Of the language model.", lower_bound=1)
flags.DEFINE_integer("width", 512, "The same.", lower_bound=4)
flags.DEFINE_float("budget", 0.4, "A device's memory, of what one device takes.")
flags.DEFINE_string("recompute", "none", "What is computed again.")


def main(argv):
    """Counts, trains and prints."""
    del argv
    from towers import devices

    stages = [int(count) for count in FLAGS.stages]
    placed = devices.configure(max(stages))
    size = {"layers": FLAGS.layers, "width": FLAGS.width}
    works.WORKS["transformer_lm"] = dataclasses.replace(
        works.WORKS["transformer_lm"], **size
    )
    model = works.build("transformer_lm")
    model.compile("adam", works.loss())
    model.optimizer.build(model.trainable_variables)
    (held,) = count(model, 1, FLAGS.micro_batches)
    budget = int(FLAGS.budget * sum(held))
    print(f"Each device has {mb(budget)}, {FLAGS.budget:.0%} of {mb(sum(held))}.\n")
    head = "devices", "micro-batches", "weights", "gradients", "slots", "activations"
    print(f"| {' | '.join(head)} | sum |")
    print("|--:|--:|--:|--:|--:|--:|---|")
    row(model, 1, 1, budget)
    for number in stages:
        row(model, number, FLAGS.micro_batches, budget)
    train(model, placed.towers, max(stages))


def count(model, stages, micro_batches):
    """Returns what each device holds."""
    import tensorflow as tf

    from towers.layers.pipeline import LayerPlacement, Pipeline
    from towers.partition.partitioned import Partitioned, judge
    from towers.stages import table

    placement = LayerPlacement(model, stages)
    pipeline = Pipeline(stages, micro_batches, "1f1b", FLAGS.recompute, placement)
    rows = FLAGS.examples // micro_batches
    x, y = works.batch("transformer_lm", 1)
    specs = [tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (x, y)]
    verdict = judge(
        model.train_step, tuple(specs), updates_apart=True, pipeline=pipeline
    )
    tower = Partitioned(verdict).staged(rows)
    return table.held_by_stages(pipeline, table.activation_bytes(tower, pipeline, rows))


def row(model, devices, micro_batches, budget):
    """Prints what the fullest device holds."""
    held = max(count(model, devices, micro_batches), key=sum)
    fits = "fits" if sum(held) <= budget else "too large"
    cells = devices, micro_batches, *map(mb, held), f"{mb(sum(held))}: {fits}"
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def train(model, devices, stages):
    """Trains a few steps in stages, and prints where variables are."""
    from towers import Stages, multi_gpu_model
    from towers.layers import tables
    from towers.layers.pipeline import LayerPlacement, weighted

    # As it was counted; by default, time counts as well.
    places = LayerPlacement(model, stages).layers
    placement = {layer.name: places[id(layer)] for layer in weighted(model)}
    parallel = multi_gpu_model(
        model,
        devices,
        stages=Stages(stages, placement),
        micro_batches=FLAGS.micro_batches,
        recompute=FLAGS.recompute,
    )
    parallel.compile("adam", works.loss(), jit_compile=False)
    per_tower = works.WORKS["transformer_lm"].examples
    x, y = works.batch("transformer_lm", FLAGS.examples // per_tower)
    losses = [float(parallel.train_on_batch(x, y)) for _ in range(3)]
    found = tables.bytes_by_device(model)
    print(f"\nTrained in {stages} stages; losses:", *(f"{x:.3f}" for x in losses))
    each = (f"{device} {mb(size)}" for device, size in sorted(found.items()))
    print(f"Weights and slots: {', '.join(each)}.")


def mb(size):
    """Says how many megabytes that is."""
    return f"{size / 2**20:,.1f} MB"


if __name__ == "__main__":
    app.run(main)
