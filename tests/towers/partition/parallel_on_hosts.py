"""Loops and functions of one's own on one of several hosts.

    python -m tests.towers.partition.parallel_on_hosts RANK ADDRESSES TOWERS FOLDER

Each host writes to FOLDER what it has computed, and what it was told.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import towers
from towers.cluster import process_group
from towers.hosts.group import Membership

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=[7, 4]).astype("float32")
Y = RANDOM.normal(size=[7, 1]).astype("float32")
ENDS = 7, 4, 1, 2


def centred(x):
    """Rows less their mean, and the largest of all."""
    return x - tf.reduce_mean(x, axis=0), tf.reduce_max(x)


def in_a_loop(x):
    """Adds random numbers to the rows, three times."""
    add = lambda i, x: (i + 1, x + tf.random.normal(tf.shape(x), seed=3))  # noqa: E731
    return tf.while_loop(lambda i, x: i < 3, add, (0, x))[1]


def of_any_size(x):
    """Adds the number of random numbers that a loop draws."""
    more = lambda t: tf.concat([t, tf.random.uniform([1], seed=5)], 0)  # noqa: E731
    shape = [tf.TensorShape([None])]
    drawn = tf.while_loop(lambda t: t[-1] < 0.8, more, [tf.zeros([1])], shape)[0]
    return x + tf.cast(tf.size(drawn), tf.float32)


def turned(x):
    """Turns the rows as complex numbers, by random angles in a loop."""

    def turn(i, z):
        return i + 1, z * tf.exp(tf.complex(0.0, tf.random.uniform([], seed=3)))

    z = tf.while_loop(lambda i, z: i < 3, turn, (0, tf.complex(1.0, 0.0)))[1]
    return x * tf.math.real(z)


def by_python(x):
    """Adds random numbers of NumPy to the rows."""
    add = lambda x: x + np.random.normal(size=x.shape).astype(x.dtype)  # noqa: E731
    return tf.ensure_shape(tf.numpy_function(add, [x], x.dtype), x.shape)


def differentiated(x):
    """Takes a gradient of a loop that draws."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.while_loop(
            lambda i, y: i < 2, lambda i, y: (i + 1, y * tf.random.normal([])), (0, x)
        )[1]
    return tape.gradient(y, x)


def in_a_list(x):
    """Adds other random numbers to each row, in a loop that fills a list."""
    return tf.map_fn(lambda row: row + tf.random.normal([4], seed=3), x)


def assigned(x, total):
    """Adds random numbers to a variable, in a loop."""
    for _ in tf.range(2):
        total.assign_add(tf.random.normal([], seed=3))
    return x + total


# Random numbers of TensorFlow's own state, as a function of the rows.
DRAWS = {
    "normal": lambda x: x + tf.random.normal(tf.shape(x), seed=3),
    "one for all": lambda x: x * tf.random.uniform([], seed=3),
    "gamma": lambda x: x * tf.random.gamma([4], 2.0, seed=3),
    "integers": lambda x: x + tf.one_hot(tf.random.uniform([], 0, 4, "int32", 3), 4),
    "shuffled rows": lambda x: tf.random.shuffle(x, seed=3),
    "in a loop": in_a_loop,
    "of any size": of_any_size,
    "complex": turned,
    "by Python": by_python,
}


def drawn(make):
    """Results of the functions in DRAWS, each called twice."""
    results = {}
    for name, function in DRAWS.items():
        function = make(function)
        results[name] = [function(tf.constant(X)).numpy().tolist() for _ in range(2)]
    return results


def trained(make_step, seed=1):
    """Trains a small model; returns its weights, and the losses."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    step, losses = make_step(model, keras.optimizers.Adam(0.01, epsilon=1e-4)), []
    for end in ENDS:
        losses.append(float(step(X[:end], Y[:end])))
    return [variable.numpy().tolist() for variable in model.variables], losses


def loss_of(model):
    """A loss whose denominator is of the whole batch, beside a mean."""

    def loss_fn(x, y):
        squares, weights = tf.square(model(x) - y), tf.nn.sigmoid(x[:, :1])
        masked = tf.reduce_sum(squares * weights) / tf.reduce_sum(weights)
        return masked + tf.reduce_mean(squares)

    return loss_fn


def on_towers(gpus, prefetches=False, **options):
    """Makes a step of `GradientTowers`."""

    def make(model, optimizer):
        variables = model.trainable_variables
        towers_ = towers.GradientTowers(loss_of(model), variables, gpus, **options)

        def step(*batch):
            if prefetches:
                (batch,) = towers_.prefetch([batch])
            loss, gradients, _ = towers_(*batch)
            towers_.apply(optimizer, gradients)
            return loss

        return step

    return make


def said(call):
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(rank, addresses, counts, folder):
    """Computes all."""
    rank, addresses = int(rank), tuple(addresses.split(","))
    mine = int(counts.split(",")[rank])
    towers.configure(num_gpus=2)
    called = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(Membership(rank, addresses, called))
    # The second host begins with the first one's weights.
    found = {"trained": trained(on_towers(mine), seed=1 + rank)}
    found["prefetched"] = trained(on_towers(mine, prefetches=True))
    make = on_towers(mine, variable_update="replicated")
    found["replicated"] = trained(make, seed=1 + rank)
    function = towers.parallelize(centred, mine)
    with tf.GradientTape() as tape:
        x = tf.constant(X)
        tape.watch(x)
        rows, largest = function(x)
        total = tf.reduce_sum(rows**2) + largest
    # The second host begins with the first one's.
    scale = tf.Variable(2.0 + rank, trainable=False)
    found["scaled"] = towers.parallelize(lambda x: x * scale, mine)(X).numpy().tolist()
    found["rows"], found["largest"] = rows.numpy().tolist(), float(largest)
    found["gradient"] = tape.gradient(total, x).numpy().tolist()
    found["differ"] = said(lambda: function(X[: 5 + rank]))
    # The second host draws other numbers.
    tf.random.set_seed(1 + rank)
    np.random.seed(1 + rank)
    found["drawn"] = drawn(lambda function: towers.parallelize(function, mine))
    total = tf.Variable(0.0, trainable=False)
    functions = in_a_list, differentiated, tf.function(lambda x: assigned(x, total))
    found["draws"] = [
        said(lambda f=f: towers.parallelize(f, mine)(X)) for f in functions
    ]
    with open(os.path.join(folder, f"found{rank}.json"), "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
