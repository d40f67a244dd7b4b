"""Checks that a model trains on towers as on one device. It writes no files.

    python -m towers.parity --model=resnet20 --dataset=digits --num_gpus=2

The flags are those of towers.train. --parity_steps sets the number of steps to compare.
The last step has a short batch, which does not divide evenly among the towers.
Exit codes: 0 equal; 1 error; 2 not equal; 130 stopped by Ctrl-C.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.program import startup
    from towers.train import flags as train_flags

    startup.begin(
        "towers.parity", lambda argv: train_flags.read_for_parity(argv, __doc__)
    )

import gc
import itertools
import sys
from typing import Any

import tensorflow as tf
from absl import flags

from towers import devices, input_pipeline
from towers.collectives import batch
from towers.parity import check_parity
from towers.program import startup
from towers.program.commands import fail, quieten, read_randaugment
from towers.train import __main__ as train

FLAGS = flags.FLAGS
_PROGRAM = "towers.parity"


def main() -> int:
    """Checks the model that the flags describe, which are read and checked.

    Returns:
        The exit code.
    """
    quieten()
    try:
        startup.end()
        return check()
    except KeyboardInterrupt:
        print()
        fail("Stopped by Ctrl-C.", _PROGRAM)
        return 130
    except (ValueError, OSError) as error:
        return fail(error, _PROGRAM)
    finally:
        # A half-read epoch ends here: TensorFlow warns if Python has gone before it.
        gc.collect()


def check() -> int:
    """Builds what the flags describe, checks it and says what was found.

    Returns:
        0 if towers equal one device, else 2.

    Raises:
        ValueError: If any input is bad.
    """
    placed = train.configure_devices()
    split_ratios = train.split_ratios(placed)
    source = train.open_source(FLAGS.dataset, FLAGS.num_classes)
    image_shape = train.choose_image_shape(source)
    model = train.build_model(source, image_shape, placed.home)
    source, *_ = train.prepare_data(source, None, [])
    with tf.device(placed.home):
        train.compile_model(model, image_shape, source.splits["train"])
    print(devices.table(placed, batch.cut(FLAGS.batch_size, split_ratios)), flush=True)
    asked = FLAGS.variable_update
    parity = check_parity(
        model,
        read_batches(source, image_shape, len(placed.towers)),
        placed.towers,
        # To choose, auto would have to train.
        builder="parameter_server" if asked == "auto" else asked,
        split_ratios=split_ratios,
        loss_placement=FLAGS.loss_placement,
        strict=FLAGS.strict,
    )
    print(f"Model {FLAGS.model}, data {source.name}: towers and one device.\n{parity}")
    return 0 if parity.equal else 2


def read_batches(
    source: input_pipeline.Source, image_shape: tuple[int, int, int], towers: int
) -> list[Any]:
    """Reads the first batches of training data, and makes the last one short.

    Args:
        source: The data.
        image_shape: (height, width, channels) of the images.
        towers: Number of towers, among which the last batch is not to divide evenly.

    Returns:
        As many batches as --parity_steps says.

    Raises:
        ValueError: If a record is bad.
    """
    preprocess = train.make_preprocess(None)
    data = input_pipeline.make_dataset(
        source,
        "train",
        batch_size=FLAGS.batch_size,
        image_shape=image_shape,
        training=True,
        recipe=FLAGS.recipe,
        randaugment=read_randaugment(FLAGS.randaugment),
        seed=FLAGS.seed,
        deterministic=True,
    ).map(lambda images, labels: (preprocess(images, None, False)[0], labels))
    with input_pipeline.blame_records(source):
        batches = list(itertools.islice(data.repeat(), FLAGS.parity_steps))
    if len(batches) > 1:
        size = int(batch.batch_size(batches[-1]))
        # One example more than divides.
        rows = (size * 3 // 4 - 1) // towers * towers + 1
        batches[-1] = batch.take(batches[-1], 0, max(rows, 1))
    return batches


if __name__ == "__main__":
    sys.exit(main())
