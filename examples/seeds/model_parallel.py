"""Model parallelism by hand: half of the layers on each of two GPUs.

Run it with `python -m examples.seeds.model_parallel`.
Without GPUs, it runs on logical CPUs.
"""

import tensorflow as tf

import towers


def main() -> list[float]:
    """Prints the losses, and returns them."""
    first, second = towers.configure(num_gpus=2).towers
    draw = tf.random.Generator.from_seed(0)
    with tf.device(first):
        w1 = tf.Variable(draw.normal([4, 8]))
    with tf.device(second):
        w2 = tf.Variable(draw.normal([8, 1]))
    x = draw.normal([32, 4])
    y = tf.reduce_sum(x, axis=1, keepdims=True)

    # One GPU waits for the other. `multi_gpu_model(model, gpus=2, stages=2,
    # micro_batches=4)` divides a Keras model by itself and keeps both busy, each with
    # another part of the batch (docs/scale/stages.md).
    @tf.function
    def step():
        with tf.GradientTape() as tape:
            with tf.device(first):
                hidden = tf.nn.relu(x @ w1)
            with tf.device(second):
                loss = tf.reduce_mean((hidden @ w2 - y) ** 2)
        gradient_1, gradient_2 = tape.gradient(loss, [w1, w2])
        w1.assign_sub(0.01 * gradient_1)
        w2.assign_sub(0.01 * gradient_2)
        return loss

    losses = [float(step()) for _ in range(50)]
    print(f"w1 on {w1.device}, w2 on {w2.device}")
    print(f"loss {losses[0]:.4f}, after 50 steps {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
