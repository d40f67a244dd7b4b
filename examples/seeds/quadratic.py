"""Finds the minimum of (x - 3)^2, averaged over noisy data on two GPUs: near 3.

Run it with `python -m examples.seeds.quadratic`.
Without GPUs, it runs on logical CPUs.
"""

import numpy as np
import tensorflow as tf

import towers


def main() -> float:
    """Prints where the minimum is, and returns it."""
    towers.configure(num_gpus=2)
    data = np.random.default_rng(0).normal(3, 1, size=1000).astype("float32")
    x = tf.Variable(0.0)

    def loss_fn(some):
        return tf.reduce_mean((x - some) ** 2)

    # Each GPU has half of the data; the gradient is that of all.
    step = towers.GradientTowers(loss_fn, [x], gpus=2)
    for _ in range(50):
        _, (gradient,), _ = step(data)
        x.assign_sub(0.1 * gradient)
    print(f"minimum at {x.numpy():.4f}; the mean of the data is {data.mean():.4f}")
    return float(x)


if __name__ == "__main__":
    main()
