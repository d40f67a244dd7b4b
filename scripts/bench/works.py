"""What is trained: models, batches and how many steps of them.

All contenders train the same: the same shapes, one constant batch, and stochastic
gradient descent, unless the model has a step and optimizers of its own. What is in
Keras is built here, on any backend.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Work:
    """One kind of work.

    Attributes:
        shape: The shape of one example.
        examples: Examples a tower.
        warmup: Steps before the first round, after the very first step.
        steps: Timed steps of a round.
        classes: How many classes there are.
        policy: Keras's policy of types.
        layers: Blocks of a language model; 0 if it is none.
        width: Features of a token, or filters of the narrowest hidden layer.
        own_step: Whether the model has a `train_step` and optimizers of its own.
        frozen: Whether batch normalization is not trained.
        dropout: Of a language model.
        known_rows: Whether the number of examples is known when a step is traced.
        rows: Of the table of an embedding, or of each.
        sent: What goes to the devices in each step: "float32", or pictures as "uint8",
            which are scaled there, or the "numbers" of pictures that stay there.
    """

    shape: tuple[int, ...]
    examples: int
    warmup: int
    steps: int
    classes: int = 10
    policy: str = "float32"
    layers: int = 0
    width: int = 0
    own_step: bool = False
    frozen: bool = False
    dropout: float = 0.0
    known_rows: bool = True
    rows: int = 1_000_000
    sent: str = "float32"


_SMALL_RESNET50 = Work((64, 64, 3), 2, warmup=1, steps=2)
_RESNET50 = Work(
    (224, 224, 3), 128, warmup=10, steps=20, classes=1000, policy="mixed_float16"
)
_LM_BF16 = Work(
    (512,),
    16,
    warmup=10,
    steps=20,
    classes=16_000,
    policy="mixed_bfloat16",
    layers=8,
    width=512,
)
WORKS = {
    "mlp": Work((784,), 32, warmup=60, steps=300),
    "resnet20": Work((32, 32, 3), 64, warmup=5, steps=12),
    "embedding": Work((20,), 128, warmup=5, steps=30),
    # Tokens, of a vocabulary of 16,000; the next token of each is to be told.
    "transformer_lm": Work(
        (128,), 4, warmup=3, steps=6, classes=16_000, layers=4, width=256
    ),
    # Bytes: what `--model=transformer_lm --dataset=text:python` builds, and deeper.
    "byte_lm": Work((128,), 32, warmup=3, steps=6, classes=256, layers=4, width=128),
    "byte_lm_8": Work((128,), 32, warmup=3, steps=6, classes=256, layers=8, width=128),
    # Numbers, beside eight tables of a million rows.
    "dlrm": Work((13,), 128, warmup=5, steps=20, classes=2),
    # Two networks each, from `examples/steps`.
    "dcgan": Work((32, 32, 1), 32, warmup=5, steps=10, width=64, own_step=True),
    "wgan_gp": Work((32, 32, 1), 32, warmup=5, steps=10, width=64, own_step=True),
    # For the time to the first step, and for memory.
    "resnet50": _SMALL_RESNET50,
    "resnet50_uint8": dataclasses.replace(_SMALL_RESNET50, sent="uint8"),
    "resnet50_kept": dataclasses.replace(_SMALL_RESNET50, sent="numbers"),
    # For GPUs.
    "resnet56": Work((32, 32, 3), 64, warmup=20, steps=50),
    "resnet50_224": _RESNET50,
    "resnet50_224_uint8": dataclasses.replace(_RESNET50, sent="uint8"),
    "resnet50_224_kept": dataclasses.replace(_RESNET50, sent="numbers"),
    "resnet50_224_bf16": dataclasses.replace(_RESNET50, policy="mixed_bfloat16"),
    "resnet50_224_frozen": dataclasses.replace(_RESNET50, frozen=True),
    "lm_bf16": _LM_BF16,
    "lm_bf16_dropout": dataclasses.replace(_LM_BF16, dropout=0.1),
    "lm_bf16_unknown_rows": dataclasses.replace(_LM_BF16, known_rows=False),
    "embedding_10m": Work((20,), 128, warmup=20, steps=50, rows=10_000_000),
}
TABLES = 8
HEADS = 4  # of a language model
LEARNING_RATE = 0.01
MOMENTUM = 0.9


def batch(name: str, towers: int):
    """Makes the batch that each step trains on.

    Returns:
        Two arrays: examples [towers * examples a tower, *shape], and labels. Of dlrm,
        examples are a dict of arrays, by column. Of a model with a step of its own, one
        array, without labels.
    """
    import numpy as np

    work = WORKS[name]
    count = work.examples * towers
    random = np.random.default_rng(0)
    if work.sent == "numbers":
        return np.arange(count, dtype="int64"), pictures(name, towers)[1]
    if work.sent == "uint8":
        return pictures(name, towers)
    if work.own_step:
        return random.random((count, *work.shape), "float32")
    if work.layers:
        tokens = random.integers(0, work.classes, (count, work.shape[0] + 1))
        return tokens[:, :-1].astype("int32"), tokens[:, 1:].astype("int32")
    if name.startswith("embedding"):
        x = random.integers(0, work.rows, (count, *work.shape)).astype("int32")
    elif name == "dlrm":
        # As clicks are: few ids are frequent, and most are rare.
        ids = np.minimum(random.zipf(1.2, (TABLES, count)), work.rows) - 1
        x = {f"id_{i}": ids[i].astype("int64") for i in range(TABLES)}
        x["numbers"] = random.standard_normal((count, *work.shape), "float32")
    else:
        x = random.standard_normal((count, *work.shape), "float32")
    return x, random.integers(0, work.classes, count).astype("int32")


def pictures(name: str, towers: int):
    """Makes the pictures of a batch, and their labels: arrays of small integers."""
    import numpy as np

    work, random = WORKS[name], np.random.default_rng(0)
    count = work.examples * towers
    x = random.integers(0, 256, (count, *work.shape), np.uint8)
    return x, random.integers(0, work.classes, count, np.uint16)


def dataset(name: str, towers: int):
    """Makes an endless `tf.data.Dataset` of the batch of `batch`."""
    import tensorflow as tf

    arrays = batch(name, towers)
    if WORKS[name].known_rows:
        data = tf.data.Dataset.from_tensors(arrays)
    else:
        count = WORKS[name].examples * towers
        data = tf.data.Dataset.from_tensor_slices(arrays).batch(count).cache()
    return data.repeat().prefetch(tf.data.AUTOTUNE)


def build(name: str, towers: int = 1):
    """Builds the Keras model, from what is sent to logits.

    A model with a step of its own is compiled.

    Args:
        name: The work.
        towers: Of how many towers a batch is, for pictures that stay in the model.
    """
    import keras

    model, work = build_network(name), WORKS[name]
    if work.sent == "float32":
        return model
    if work.sent == "uint8":
        inputs = x = keras.Input(work.shape, dtype="uint8")
    else:
        inputs = keras.Input((), dtype="int64")
        x = _kept(pictures(name, towers)[0])(inputs)
    return keras.Model(inputs, model(keras.layers.Rescaling(1 / 127.5, -1)(x)))


def _kept(examples):
    """Makes a layer that keeps examples on the model's device, and looks up rows."""
    import keras
    import tensorflow as tf

    class Kept(keras.layers.Layer):
        def build(self, input_shape):
            self.examples = self.add_weight(
                shape=examples.shape,
                initializer=lambda shape, dtype: tf.constant(examples),
                dtype="uint8",
                trainable=False,
            )

        def call(self, numbers):
            # GPUs look up bytes in variables only.
            return tf.gather(self.examples.value, numbers)

    return Kept()


def preprocess(name: str, towers: int):
    """Makes what towers do with what is sent, before `build_network`'s model.

    Returns:
        The `preprocess` of `multi_gpu_model`; None if they do nothing.
    """
    import keras

    from towers import input_pipeline
    from towers.tower.kept import KeptExamples
    from towers.tower.preprocess import OfSmallTypes

    sent, dtype = WORKS[name].sent, keras.config.dtype_policy().compute_dtype
    if sent == "float32":
        return None
    kept = KeptExamples((*pictures(name, towers), None)) if sent == "numbers" else None

    def scaled(x, y, training):
        return input_pipeline.normalize(x, dtype), y

    return OfSmallTypes(scaled, (None, "int64", None), kept)


def build_network(name: str):
    """Builds the Keras model as `build`, from examples that are floats to logits."""
    import keras

    from towers import models

    work = WORKS[name]
    keras.config.set_dtype_policy(work.policy)
    keras.utils.set_random_seed(0)
    if work.own_step:
        return _own_step(name, work.width)
    if work.layers:
        (length,) = work.shape
        facts = models.Facts(
            input_shape=work.shape,
            num_outputs=work.classes,
            vocabulary_size=work.classes,
            sequence_length=length,
        )
        shape = {"layers": work.layers, "width": work.width}
        options = shape | {"heads": HEADS, "dropout": work.dropout}
        return models.build("transformer_lm", facts, options=options, seed=0)
    if name == "dlrm":
        tables = {f"id_{i}": work.rows for i in range(TABLES)}
        facts = models.Facts(
            input_shape={"numbers": work.shape, **dict.fromkeys(tables, ())},
            num_outputs=work.classes,
            num_classes=work.classes,
            table_sizes=tables,
        )
        return models.build(name, facts, seed=0)
    if name in ("resnet20", "resnet56"):
        return models.build(
            name, input_shape=work.shape, num_classes=work.classes, seed=0
        )
    if name.startswith("resnet50"):
        model = keras.applications.ResNet50(
            weights=None,
            input_shape=work.shape,
            classes=work.classes,
            classifier_activation=None,
        )
        for layer in model.layers if work.frozen else ():
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.trainable = False
        return model
    if name.startswith("embedding"):
        inputs = keras.Input(work.shape, dtype="int32")
        hidden = [
            keras.layers.Embedding(work.rows, 64),
            keras.layers.GlobalAveragePooling1D(),
        ]
    else:
        inputs = keras.Input(work.shape)
        hidden = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
    return keras.Sequential([inputs, *hidden, keras.layers.Dense(work.classes)])


def _own_step(name, width):
    """Builds and compiles a model of `examples/steps`."""
    import keras

    from examples.steps import dcgan, wgan_gp

    if name == "dcgan":
        model, latent = dcgan.build("batch", width), dcgan.LATENT
    else:
        model, latent = wgan_gp.build(width), wgan_gp.LATENT
    # Keras under a strategy builds no optimizers of a model's own. It would build the
    # model for pictures, but `call` takes noise.
    model(keras.ops.zeros((1, latent)))
    model.d_optimizer.build(model.discriminator.trainable_variables)
    model.g_optimizer.build(model.generator.trainable_variables)
    return model


def optimizer(name: str):
    """Makes the Keras optimizer."""
    import keras

    # Momentum would touch each row of a table in every step.
    momentum = 0.0 if name.startswith(("embedding", "dlrm")) else MOMENTUM
    return keras.optimizers.SGD(LEARNING_RATE, momentum=momentum)


def loss(**options):
    """Makes the Keras loss."""
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)
