"""Cases of metrics with masks and weights, of tokens and of pixels: data."""

import functools

import numpy as np
from keras import metrics

from tests.exact import cases, masks, ranks
from tests.exact.cases import OUTPUTS, STEPS

GROUP = "metrics of tokens and pixels"
_case = functools.partial(cases._case, GROUP)


def of_labels(ignored=None):
    """Metrics whose targets are labels."""
    iou = {"num_classes": OUTPUTS, "sparse_y_pred": False, "ignore_class": ignored}
    return [
        metrics.SparseCategoricalAccuracy("accuracy"),
        metrics.SparseTopKCategoricalAccuracy(2, name="top"),
        metrics.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=ignored, name="crossentropy"
        ),
        metrics.MeanIoU(**iou, name="mean_iou"),
        metrics.IoU(**iou, target_class_ids=[0, 2], name="iou"),
    ]


def of_probabilities():
    """Metrics with thresholds, confusion matrices, and means."""
    return [
        metrics.AUC(name="auc"),
        metrics.AUC(curve="PR", num_thresholds=20, name="auc_pr"),
        metrics.Precision(name="precision"),
        metrics.Precision(thresholds=[0.3, 0.6], name="precisions"),
        metrics.Recall(top_k=2, name="recall_top"),
        metrics.PrecisionAtRecall(0.5, name="precision_at_recall"),
        metrics.RecallAtPrecision(0.4, name="recall_at_precision"),
        metrics.SensitivityAtSpecificity(0.5, name="sensitivity"),
        metrics.SpecificityAtSensitivity(0.5, name="specificity"),
        metrics.TruePositives(name="true_positives"),
        metrics.TrueNegatives(name="true_negatives"),
        metrics.FalsePositives([0.2, 0.4], name="false_positives"),
        metrics.FalseNegatives(name="false_negatives"),
        metrics.BinaryAccuracy(threshold=0.3, name="binary_accuracy"),
        metrics.BinaryCrossentropy(label_smoothing=0.1, name="binary_crossentropy"),
        metrics.CategoricalAccuracy(name="accuracy"),
        metrics.TopKCategoricalAccuracy(2, name="top"),
        metrics.CategoricalHinge(name="categorical_hinge"),
        metrics.KLDivergence(name="kl_divergence"),
        metrics.Poisson(name="poisson"),
    ]


def of_numbers():
    """Metrics of numbers, which take weights of tokens."""
    return [
        metrics.MeanAbsoluteError("mae"),
        metrics.MeanSquaredError("mse"),
        metrics.RootMeanSquaredError("rmse"),
        metrics.CosineSimilarity("cosine"),
        metrics.LogCoshError("log_cosh"),
    ]


def _scores():
    """Of a batch of examples: these take outputs of two axes only."""
    return [
        metrics.F1Score(average="macro", threshold=0.4, name="f1"),
        metrics.FBetaScore(average="weighted", beta=2.0, name="f_beta"),
        metrics.OneHotMeanIoU(OUTPUTS, name="mean_iou"),
        metrics.AUC(multi_label=True, num_labels=OUTPUTS, name="auc"),
        metrics.Precision(class_id=1, thresholds=0.3, name="precision"),
        metrics.R2Score(name="r2"),
        metrics.PearsonCorrelation(name="pearson"),
        metrics.ConcordanceCorrelation(name="concordance"),
    ]


def _both(make):
    """The same metrics with the weights and without them."""
    return lambda: {"metrics": make(), "weighted_metrics": make()}


def _masked():
    probable = masks.logits(activation="softmax")
    weights = (STEPS,)
    for name, words in {
        "padding": masks.words,
        "padding, weights": functools.partial(masks.words, weights=weights),
        "only padding on the first tower": functools.partial(masks.words, silent=3),
    }.items():
        yield _case(
            f"labels, {name}",
            masks.logits(),
            words(),
            masks.crossentropy(),
            compile=_both(of_labels),
        )
        yield _case(
            f"one-hot, {name}",
            probable,
            words("one-hot"),
            "mse",
            compile=_both(of_probabilities),
        )
        yield _case(
            f"numbers, {name}",
            masks.logits(),
            words("numbers"),
            "mse",
            compile=_both(of_numbers),
        )
    x, y, given = masks.words(weights=weights, sizes=(7,))()[0]
    yield _case(
        "labels, padding, weights, validation",
        masks.logits(),
        masks.words(weights=weights),
        masks.crossentropy(),
        compile=_both(of_labels),
        fit={"validation_data": (x, y, given), "validation_batch_size": 4},
    )


def _of_pixels():
    inner = ranks.INNER["pixels"]
    for name, weights in {"": None, ", weights": inner}.items():
        yield _case(
            f"labels of pixels{name}",
            ranks.model("pixels"),
            masks.unlabelled("pixels", weights, 2),
            masks.crossentropy(ignore_class=2),
            compile=_both(functools.partial(of_labels, 2)),
        )
        yield _case(
            f"one-hot of pixels{name}",
            ranks.model("pixels", "softmax"),
            ranks.batches("pixels", "one-hot", weights),
            "categorical_crossentropy",
            compile=_both(of_probabilities),
        )


def _of_examples():
    yield _case(
        "scores of examples, weights",
        cases._mlp(activation="softmax"),
        cases._classes(kind="one-hot", weighted=True),
        "mse",
        compile=_both(_scores),
    )
    yield _case(
        "BinaryIoU, weights for each number",
        cases._mlp(1, "sigmoid"),
        _two_classes,
        "binary_crossentropy",
        compile=lambda: {
            "weighted_metrics": [metrics.BinaryIoU(threshold=0.4), metrics.AUC()]
        },
    )


def _two_classes():
    y = (cases._random(21, 1, seed=1) > 0).astype(np.float32)
    return cases._cut(cases._random(21, 6), y, cases._weights(21, 1))


def _ways():
    yield from masks.in_each_way(
        GROUP,
        "labels, padding and weights",
        masks.logits(),
        masks.words(weights=(STEPS,), silent=3),
        masks.crossentropy(reduction="mean_with_sample_weight"),
        _both(of_labels),
        ("2 towers", "4 towers", "shares (1, 2, 3)", "steps_per_execution", "gathered"),
    )


CASES = [*_masked(), *_of_pixels(), *_of_examples(), *_ways()]
