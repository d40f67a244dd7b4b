"""Multiplies matrices on the third GPU, where TensorFlow may take 1 GB of memory.

Run it with `python -m examples.seeds.matmul_on_gpu`.
Without GPUs, it runs on logical CPUs.
"""

import tensorflow as tf

import towers


def main() -> tf.Tensor:
    """Prints the product and its device, and returns the product."""
    # Or allow_growth=True in place of the limit: memory is then taken as needed.
    devices = towers.configure(num_gpus=3, gpu_memory_limit_mb=1024)
    third = devices.towers[2]  # "/device:GPU:2", or "/device:CPU:2" without GPUs.
    with tf.device(third):
        a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        b = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        found = tf.matmul(a, b)
    print(found.numpy(), "on", found.device)
    return found


if __name__ == "__main__":
    main()
