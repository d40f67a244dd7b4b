"""Cases of masks, ignored classes and outputs of different kinds: data."""

import functools

import keras
import numpy as np
from keras import layers, losses, metrics

from tests.exact import cases, ranks
from tests.exact.cases import FEATURES, OUTPUTS, STEPS, UNEVEN

WORDS = 12


def logits(activation=None):
    """Logits of each word, which are masked where there is none."""
    return cases._of(
        cases._layer(layers.Embedding, WORDS, 4, mask_zero=True),
        cases._dense(4, "tanh"),
        cases._dense(OUTPUTS, activation),
        shape=(STEPS,),
        dtype="int32",
    )


def words(
    kind="labels", weights=None, silent=0, sizes=UNEVEN, ignored=None, of="tokens"
):
    """Batches of padded words, a target for each.

    Args:
        kind: Of the targets; see `ranks.targets`.
        weights: The inner shape of sample weights, if there are any. They are all 0 for
            the first of three towers.
        silent: How many of the first sequences are all padding.
        sizes: Of the batches.
        ignored: A class to give a third of the targets, and all of the first three.
        of: What has targets: "tokens", or "pixels", which are numbers and no words.
    """

    def batches():
        n = sum(sizes)
        inner = ranks.INNER[of]
        if of == "tokens":
            ((ids, _),) = cases._words((n,), silent=silent)()
        else:
            ids = cases._random(n, *inner, FEATURES)
        y = ranks.targets(kind, n, *inner)
        if ignored is not None:
            y = np.where(np.random.default_rng(3).random(y.shape) < 1 / 3, ignored, y)
            y[:3] = ignored
        given = [] if weights is None else [cases._weights(n, *weights)]
        return cases._cut(ids, y, *given, sizes=sizes)

    return batches


def crossentropy(**options):
    """The loss of classes of tokens and pixels."""
    return losses.SparseCategoricalCrossentropy(from_logits=True, **options)


_case = functools.partial(cases._case, "masks")


def _padded():
    """Padding, as `Embedding(mask_zero=True)` and `Masking` tell it."""
    for reduction in cases.REDUCTIONS:
        slow = {"optimizer": ranks._slowly} if reduction in ("sum", None) else {}
        for name, weights in {
            "": None,
            ", weights (n, tokens)": (STEPS,),
        }.items():
            yield _case(
                f"Embedding, reduction {reduction}{name}",
                logits(),
                words(weights=weights),
                crossentropy(reduction=reduction),
                **slow,
            )
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):
        for name, silent in {"the first tower": 3, "the first batch": 8}.items():
            for weighted in (False, True):
                yield _case(
                    f"{name} has only padding, {reduction}" + ", weights" * weighted,
                    logits(),
                    words(silent=silent, weights=(STEPS,) if weighted else None),
                    crossentropy(reduction=reduction),
                )
    masking = cases._of(
        cases._layer(layers.Masking, 0.0),
        cases._dense(4, "tanh"),
        cases._dense(OUTPUTS),
        shape=(STEPS, FEATURES),
    )
    for policy in ("float32", "mixed_bfloat16"):
        yield _case(
            f"Masking, {policy}", masking, _gaps("numbers"), "mse", policy=policy
        )
    recurrent = cases._of(
        cases._layer(layers.Masking, 0.0),
        cases._layer(layers.LSTM, 4, return_sequences=True),
        cases._dense(OUTPUTS),
        shape=(STEPS, FEATURES),
    )
    yield _case("Masking, LSTM, weights", recurrent, _gaps("labels"), crossentropy())
    yield _case(
        "of pixels",
        cases._of(
            PixelMask,
            cases._dense(4, "tanh"),
            cases._dense(OUTPUTS),
            shape=(*ranks.INNER["pixels"], FEATURES),
        ),
        words(of="pixels", weights=(1, 1)),
        crossentropy(),
    )


def _gaps(kind):
    """Sequences with steps that are 0, all of them for the first of three towers."""

    def batches():
        x = cases._random(21, STEPS, FEATURES)
        x[np.random.default_rng(4).random(x.shape[:2]) < 0.4] = 0
        x[:3] = 0
        y = ranks.targets(kind, 21, STEPS)
        if kind == "numbers":
            y += 2  # as all numbers of cases in 16 bits; see `cases`
        weights = [cases._weights(21, STEPS)] * (kind == "labels")
        return cases._cut(x, y, *weights)

    return batches


class PixelMask(keras.layers.Layer):
    """Masks the pixels whose first number is negative."""

    def call(self, x):
        return 1.0 * x

    def compute_mask(self, x, mask=None):
        return x[..., 0] >= 0


def _ignored():
    """Classes that a loss ignores, all targets of the first of three towers."""
    for of in ranks.INNER:
        for reduction in ("sum_over_batch_size", "sum", "mean_with_sample_weight"):
            slow = {"optimizer": ranks._slowly} if reduction == "sum" else {}
            for weighted in (False, True):
                yield _case(
                    f"ignore_class of {of}, {reduction}" + ", weights" * weighted,
                    ranks.model(of),
                    unlabelled(of, ranks.INNER[of] if weighted else None),
                    crossentropy(ignore_class=255, reduction=reduction),
                    **slow,
                )
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):
        yield _case(
            f"ignore_class, and padding, {reduction}",
            logits(),
            words(ignored=255, weights=(STEPS,)),
            crossentropy(ignore_class=255, reduction=reduction),
        )
    yield _case(
        "ignore_class=-1, which is no class",
        logits(),
        words(ignored=-1),
        crossentropy(ignore_class=-1),
    )


def unlabelled(of, weights, ignored=255):
    """Batches with a class to ignore, which the first of three towers has only."""

    def batches():
        found = ranks.batches(of, "labels", weights)()
        random = np.random.default_rng(3)
        for number, (_, y, *_) in enumerate(found):
            y[random.random(y.shape) < 1 / 3] = ignored
            if not number:
                y[:3] = ignored
        return found

    return batches


def some_masked():
    """Outputs for words, whose padding is masked, for what has no mask, and for all."""
    ids, numbers = keras.Input((STEPS,), dtype="int32"), keras.Input((STEPS, FEATURES))
    words = layers.Embedding(WORDS, 4, mask_zero=True)(ids)
    steps = layers.Masking(0.0)(numbers)
    outputs = {
        "word": layers.Dense(OUTPUTS, name="word")(layers.Dense(4, "tanh")(words)),
        "step": layers.Dense(OUTPUTS, name="step")(layers.Dense(4, "tanh")(steps)),
        "plain": layers.Dense(2, name="plain")(layers.Dense(4, "tanh")(numbers)),
        "whole": layers.Dense(1, name="whole")(layers.GlobalAveragePooling1D()(words)),
    }
    return keras.Model([ids, numbers], outputs)


def of_all_outputs(weighted, silent=0):
    """What `some_masked` is trained on."""

    def batches():
        ((ids, _),) = cases._words((21,), silent=silent)()
        x = cases._random(21, STEPS, FEATURES)
        x[np.random.default_rng(4).random(x.shape[:2]) < 0.4] = 0
        y = {
            "word": ranks.targets("labels", 21, STEPS),
            "step": ranks.targets("numbers", 21, STEPS),
            "plain": (cases._random(21, STEPS, 2, seed=5) > 0).astype("float32"),
            "whole": cases._random(21, 1, seed=6),
        }
        shapes = {"word": (STEPS,), "step": (1,), "plain": (STEPS,), "whole": ()}
        weights = {name: cases._weights(21, *each) for name, each in shapes.items()}
        return cases._cut((ids, x), y, *[weights] * weighted)

    return batches


def their_losses(**options):
    """A loss of its own kind for each output."""
    return {
        "word": crossentropy(**options),
        "step": losses.CosineSimilarity(reduction="mean_with_sample_weight"),
        "plain": losses.BinaryCrossentropy(from_logits=True, reduction="sum"),
        "whole": losses.Huber(),
    }


def their_metrics():
    """Metrics of its own for each output, some of which count the weights."""
    return {
        "loss_weights": {"word": 1.0, "step": 0.5, "plain": 0.01, "whole": 0.3},
        "metrics": {"word": ["accuracy"], "whole": ["mae"]},
        "weighted_metrics": {
            "word": [metrics.SparseTopKCategoricalAccuracy(2, name="top")],
            "step": ["mae"],
            "plain": [metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
        },
    }


def _outputs():
    for name, fields in {
        "": {"batches": of_all_outputs(weighted=False)},
        ", weights": {"batches": of_all_outputs(weighted=True)},
        ", mean_with_sample_weight": {
            "batches": of_all_outputs(weighted=True),
            "loss": their_losses(reduction="mean_with_sample_weight"),
        },
        ", ignore_class": {
            "batches": of_all_outputs(weighted=True),
            "loss": their_losses(ignore_class=1),
        },
        ", one has only padding on the first tower": {
            "batches": of_all_outputs(weighted=False, silent=3)
        },
        ", one of them gathered": {
            "batches": of_all_outputs(weighted=True),
            "loss": their_losses() | {"whole": cases._contrast},
        },
    }.items():
        yield _case(
            f"four outputs, of which two have masks of their own{name}",
            some_masked,
            **{"loss": their_losses(), "compile": their_metrics} | fields,
        )


# Ways to train, for what needs totals of all towers.
WAYS = {
    "2 towers": {"towers": 2},
    "4 towers": {"towers": 4},
    "shares (1, 2, 3)": {"options": {"split_ratios": (1, 2, 3)}},
    "gradient accumulation": {
        "optimizer": cases._optimizer("SGD", gradient_accumulation_steps=2)
    },
    "global_clipnorm": {"optimizer": cases._optimizer("SGD", global_clipnorm=0.02)},
    "clipnorm, Adam": {"optimizer": cases._optimizer("Adam", clipnorm=0.02)},
    "gathered": {"options": {"loss_placement": "gathered"}},
    "mixed_float16": {"policy": "mixed_float16"},
    "jit_compile": {"further": {"jit_compile": True}},
    "steps_per_execution": {"further": {"steps_per_execution": 3}},
    "run_eagerly": {"further": {"run_eagerly": True}},
}


def in_each_way(group, name, make, batches, loss, compile=dict, ways=tuple(WAYS)):
    """Cases that train something in all of these ways."""
    for way in ways:
        fields = dict(WAYS[way])
        further = fields.pop("further", {})
        yield cases._case(
            group,
            f"{name}, {way}",
            make,
            batches,
            loss,
            compile=lambda more=further: compile() | more,
            **fields,
        )


def _ways():
    yield from in_each_way(
        "masks",
        "padding and weights",
        logits(),
        words(weights=(STEPS,), silent=3),
        crossentropy(reduction="mean_with_sample_weight"),
        functools.partial(dict, weighted_metrics=["accuracy"]),
    )
    yield from in_each_way(
        "masks",
        "ignored pixels",
        ranks.model("pixels"),
        unlabelled("pixels", None),
        crossentropy(ignore_class=255),
        functools.partial(dict, metrics=["accuracy"]),
        ("2 towers", "gradient accumulation", "mixed_float16", "jit_compile"),
    )
    yield from in_each_way(
        "masks",
        "four outputs, two masked, weights",
        some_masked,
        of_all_outputs(weighted=True),
        their_losses(),
        their_metrics,
        ("2 towers", "shares (1, 2, 3)", "gradient accumulation"),
    )
    # XLA makes the gradient of a cosine of zeros no number, on one device as well.
    yield from in_each_way(
        "masks",
        "four outputs, two masked, weights, no cosine",
        some_masked,
        of_all_outputs(weighted=True),
        their_losses()
        | {"step": losses.MeanSquaredError(reduction="mean_with_sample_weight")},
        their_metrics,
        ("jit_compile",),
    )


CASES = [*_padded(), *_ignored(), *_outputs(), *_ways()]
