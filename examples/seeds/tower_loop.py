"""The tower loop of TensorFlow's CIFAR-10 tutorial, on scikit-learn's digits.

Run it with `python -m examples.seeds.tower_loop`.
Without GPUs, it runs on logical CPUs.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import towers


def main() -> float:
    """Prints the losses, and returns the last one."""
    towers.configure(num_gpus=2)
    keras.utils.set_random_seed(0)
    pictures, labels = load_digits(return_X_y=True)
    data = (pictures / 16).astype("float32"), labels
    batches = tf.data.Dataset.from_tensor_slices(data).batch(100)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.5)

    def loss_fn(x, y):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
        return tf.reduce_mean(losses)

    # In place of `tower_grads` and `average_gradients`.
    step = towers.GradientTowers(loss_fn, model.trainable_variables, gpus=2)

    @tf.function
    def train(x, y):
        loss, gradients, _ = step(x, y)
        step.apply(optimizer, gradients)
        return loss

    for epoch in range(3):
        for x, y in batches:
            loss = train(x, y)
        print(f"epoch {epoch + 1}: loss of the last batch {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
