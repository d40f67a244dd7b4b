"""Adds two vectors of seven numbers: two GPUs add a part each.

Run it with `python -m examples.seeds.vector_add`.
Without GPUs, it runs on logical CPUs.
"""

import tensorflow as tf

import towers


def main() -> tf.Tensor:
    """Prints the sum, and returns it."""
    towers.configure(num_gpus=2)
    add = towers.parallelize(tf.add, gpus=2)
    # Seven do not divide evenly: one GPU adds four numbers, the other three.
    found = add(tf.range(7.0), 10 * tf.range(7.0))
    print(found.numpy())
    return found


if __name__ == "__main__":
    main()
