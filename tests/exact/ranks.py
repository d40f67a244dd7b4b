"""Cases of losses of tokens and pixels, whose outputs have 3 and 4 axes: data."""

import functools

import numpy as np
from keras import layers, losses, optimizers

from tests.exact import cases
from tests.exact.cases import FEATURES, OUTPUTS, STEPS, UNEVEN

# What a value of the output is of, and the shape of an example of them.
INNER = {"tokens": (STEPS,), "pixels": (4, 3)}
_EACH = {"tokens": "(n, tokens)", "pixels": "(n, height, width)"}


def model(of, activation=None, units=OUTPUTS):
    """A function that builds a model with some outputs for each token, or pixel."""
    if of == "tokens":
        hidden = cases._dense(4, "tanh")
    else:
        convolution = {"padding": "same", "activation": "tanh"}
        hidden = cases._layer(layers.Conv2D, 4, 3, **convolution)
    shape = (*INNER[of], FEATURES)
    return cases._of(hidden, cases._dense(units, activation), shape=shape)


def targets(kind, *shape):
    """Numbers, labels, or labels as one-hot, smooth ones or signs; see `cases`."""
    if kind == "numbers":
        return cases._random(*shape, OUTPUTS, seed=1)
    labels = cases._labels(shape)
    one_hot = np.eye(OUTPUTS, dtype="float32")[labels]
    return {
        "labels": labels,
        "one-hot": one_hot,
        "smooth": 0.7 * one_hot + 0.1,
        "signs": 2 * one_hot - 1,
    }[kind]


def batches(of, kind, weights=None, sizes=UNEVEN):
    """Batches of tokens or pixels, with sample weights of shape (n, *weights)."""

    def cut():
        n = sum(sizes)
        x = cases._random(n, *INNER[of], FEATURES)
        given = [] if weights is None else [cases._weights(n, *weights)]
        return cases._cut(x, targets(kind, n, *INNER[of]), *given, sizes=sizes)

    return cut


# Of each loss: what it is trained on, and the last activation. Others: as `_OTHERS`.
_TRAINED_ON = {
    "SparseCategoricalCrossentropy": ("labels", "softmax"),
    "CategoricalGeneralizedCrossEntropy": ("labels", "softmax"),
    "Hinge": ("signs", "tanh"),
    "SquaredHinge": ("signs", "tanh"),
    "MeanSquaredError": ("numbers", None),
    "MeanAbsoluteError": ("numbers", None),
    "Huber": ("numbers", None),
    "LogCosh": ("numbers", None),
    "CosineSimilarity": ("numbers", None),
}
_OTHERS = "smooth", "softmax"


def _slowly():
    """For losses that are as large as the batch, or percent; so are their gradients."""
    return optimizers.SGD(1e-3, momentum=0.9)


def _each_loss():
    """Every loss with a weight for each token, and for each pixel."""
    for name, kind in cases._classes_of(losses, losses.Loss):
        if name in ("CTC", "Circle"):  # have one rank, which is in cases.py
            continue
        target, activation = _TRAINED_ON.get(name, _OTHERS)
        slow = {"optimizer": _slowly} if "Percentage" in name else {}
        for of, inner in INNER.items():
            yield cases._case(
                "ranks",
                f"{name} of {of}, weights {_EACH[of]}",
                model(of, activation),
                batches(of, target, inner),
                kind(),
                **slow,
            )


def _each_reduction():
    """The loss of every language model and segmentation network."""
    means = "sum_over_batch_size", "mean_with_sample_weight"
    for of, inner in INNER.items():
        ones = (1,) * len(inner)
        for reduction in cases.REDUCTIONS if of == "tokens" else means:
            weights = {"": None, f", weights {_EACH[of]}": inner}
            if reduction in means:
                weights[f", weights {('n', *ones)}".replace("'", "")] = ones
            for name, each in weights.items():
                yield cases._case(
                    "ranks",
                    f"logits of {of}, reduction {reduction}{name}",
                    model(of),
                    batches(of, "labels", each),
                    losses.SparseCategoricalCrossentropy(
                        from_logits=True, reduction=reduction
                    ),
                    **({"optimizer": _slowly} if reduction in ("sum", None) else {}),
                )


def _others():
    case = functools.partial(cases._case, "ranks")
    yield case(
        "Dice of each picture",
        model("pixels", "softmax"),
        batches("pixels", "one-hot"),
        losses.Dice(axis=(1, 2, 3)),
    )
    yield case(
        "Tversky of each picture, weights (n,)",
        model("pixels", "softmax"),
        batches("pixels", "one-hot", ()),
        losses.Tversky(axis=(1, 2, 3)),
    )
    yield case(
        "CTC, weights (n,)",
        cases._of(cases._dense(5), shape=(STEPS, FEATURES)),
        lambda: cases._cut(
            cases._random(21, STEPS, FEATURES),
            1 + cases._labels(42).reshape(21, 2),
            cases._weights(21),
        ),
        losses.CTC(),
    )
    yield case(
        "CTC, mean_with_sample_weight",
        cases._of(cases._dense(5), shape=(STEPS, FEATURES)),
        lambda: cases._cut(
            cases._random(21, STEPS, FEATURES),
            1 + cases._labels(42).reshape(21, 2),
            cases._weights(21),
        ),
        losses.CTC(reduction="mean_with_sample_weight"),
    )
    yield case(
        "function, mean over tokens",
        model("tokens"),
        batches("tokens", "numbers", (STEPS,)),
        cases.Quartic(reduction="mean_with_sample_weight"),
    )
    yield case(
        "binary crossentropy, one number for each token, smoothed",
        model("tokens", units=1),
        _signs_of_tokens,
        losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1),
    )


def _signs_of_tokens():
    x, wanted = cases._random(21, STEPS, FEATURES), cases._random(21, STEPS, 1, seed=1)
    return cases._cut(x, (wanted > 0).astype("float32"), cases._weights(21, STEPS))


CASES = [*_each_loss(), *_each_reduction(), *_others()]
