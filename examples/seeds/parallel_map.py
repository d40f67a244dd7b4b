"""What parallel `map` and `prefetch` are worth: the same work, three pipelines.

`towers benchmark` measures all stages of a pipeline that reads files.
Run it with `python -m examples.seeds.parallel_map`.
Without GPUs, it runs on logical CPUs.
"""

import time

import tensorflow as tf

import towers


def _slow(n):
    """As a file that takes 5 ms to read: threads can wait for several at a time."""
    return tf.numpy_function(lambda n: (time.sleep(0.005), n * n)[1], [n], tf.int64)


def main(count: int = 100) -> dict[str, int]:
    """Prints each pipeline's time, and returns the sum of its numbers."""
    towers.configure(num_gpus=2)
    numbers = tf.data.Dataset.range(count)
    mapped = numbers.map(_slow).batch(10)
    together = numbers.map(_slow, num_parallel_calls=8).batch(10)
    pipelines = {
        "map": mapped,
        "map, prefetch": mapped.prefetch(2),
        "parallel map, prefetch": together.prefetch(2),
    }
    # Otherwise tf.data prefetches by itself.
    bare = tf.data.Options()
    bare.experimental_optimization.apply_default_optimizations = False
    sums = {}
    for name, batches in pipelines.items():
        begin, sums[name] = time.perf_counter(), 0
        for batch in batches.with_options(bare):
            time.sleep(0.02)  # A step of training; `prefetch` reads on meanwhile.
            sums[name] += int(tf.reduce_sum(batch))
        print(f"{name}: {time.perf_counter() - begin:.2f} s, sum {sums[name]}")
    return sums


if __name__ == "__main__":
    main()
