"""A tf.data pipeline of one's own in `fit`: towers cut its batches.

Run it with `python -m examples.seeds.own_pipeline`.
Without GPUs, it runs on logical CPUs.
"""

import keras
import tensorflow as tf

import towers


def pipeline() -> tf.data.Dataset:
    """Returns batches of numbers from 0 to 1, and 2 x + 1; the last one is smaller."""
    numbers = tf.data.Dataset.range(1000).shuffle(1000, seed=0)
    points = numbers.map(lambda n: tf.cast(n, tf.float32) / 1000)
    pairs = points.map(lambda x: (x[None], 2 * x + 1))
    return pairs.batch(64).prefetch(tf.data.AUTOTUNE)


def main() -> tuple[float, float]:
    """Prints the line that was found, and returns its slope and offset."""
    towers.configure(num_gpus=2)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    parallel = towers.multi_gpu_model(model, gpus=2)
    parallel.compile(keras.optimizers.Adam(0.1), "mse")
    # 64 is the batch of both GPUs together.
    parallel.fit(pipeline(), epochs=10, verbose=0)
    slope, offset = (float(weight.numpy().squeeze()) for weight in model.weights)
    print(f"y = {slope:.3f} x + {offset:.3f}; expected y = 2 x + 1")
    return slope, offset


if __name__ == "__main__":
    main()
