"""tf-keras's tests of correctness under distribution, with towers in its place."""

import itertools
import json

import pytest

from tests import hosts
from tests.variants import for_the_report, one_in, slow

# One host with two towers; hosts with one tower each, two each, and one beside two.
LAYOUTS = (2,), (1, 1), (2, 2), (1, 2)
# The others take half an hour.
OFTEN = ((2,), "replicated"), ((1, 1), "parameter_server")
BUILDERS = "parameter_server", "replicated"
INPUTS = [
    {"use_numpy": numpy, "use_validation_data": validation}
    for numpy, validation in itertools.product((True, False), repeat=2)
]

DNN = (
    "test_dnn_correctness",
    "test_dnn_correctness_with_partial_last_batch_eval",
    "test_dnn_correctness_with_partial_last_batch",
)
CNN = (
    "test_cnn_correctness",
    "test_cnn_with_batch_norm_correctness",
    "test_cnn_with_sync_batch_norm_correctness",
    "test_cnn_correctness_with_partial_last_batch_eval",
    "test_cnn_with_batch_norm_correctness_and_partial_last_batch_eval",
)
EMBEDDING = (
    "test_embedding_model_correctness",
    "test_embedding_time_distributed_model_correctness",
)
LSTM = (
    "test_lstm_model_correctness",
    "test_lstm_model_correctness_mixed_precision",
)
# Each runs in every layout, by both builders, with other inputs in each layout; one in
# two where not all do.
TESTS = {
    "TestDistributionStrategyDnnCorrectness": DNN,
    "TestDistributionStrategyDnnCorrectnessWithSubclassedModel": DNN,
    "DistributionStrategyEmbeddingModelCorrectnessTest": EMBEDDING,
    "DistributionStrategySiameseEmbeddingModelCorrectnessTest": (
        "test_siamese_embedding_model_correctness",
    ),
    "DistributionStrategyCnnCorrectnessTest": CNN,
    "DistributionStrategyGruModelCorrectnessTest": ("test_gru_model_correctness",),
    "DistributionStrategyLstmModelCorrectnessTest": LSTM,
}
# These have inputs of their own.
ALONE = (
    "TestDistributionStrategyDnnCorrectness.test_dnn_with_dynamic_learning_rate",
    "TestDistributionStrategyDnnCorrectnessWithSubclassedModel"
    ".test_dnn_with_dynamic_learning_rate",
    "TestDistributionStrategyDnnMetricCorrectness.test_simple_dnn_metric_correctness",
    "TestDistributionStrategyDnnMetricEvalCorrectness"
    ".test_identity_model_metric_eval_correctness",
)
QUICK = "DistributionStrategyEmbeddingModelCorrectnessTest." + EMBEDDING[0]


def _runs(layout, builder):
    first = LAYOUTS.index(layout)
    names = [f"{group}.{name}" for group, of_it in TESTS.items() for name in of_it]
    for k, name in enumerate(names):
        if one_in(2, f"{name} {layout} {builder}"):
            yield name, builder, INPUTS[(first + k) % len(INPUTS)]
    for name in ALONE:
        if one_in(2, f"{name} {layout} {builder}"):
            yield name, builder, {}


@pytest.mark.parametrize(
    ("layout", "runs"),
    [
        pytest.param((1, 1), [(QUICK, "replicated", INPUTS[2])], id="quick"),
        *(
            (slow if way in OFTEN else for_the_report)(
                way[0], [*_runs(*way)], id=f"{way[0]} {way[1]}"
            )
            for way in itertools.product(LAYOUTS, BUILDERS)
        ),
    ],
)
def test_hosts_are_correct(layout, runs, tmp_path):
    file, listed = tmp_path / "found.jsonl", tmp_path / "runs.json"
    listed.write_text(json.dumps(runs))
    module = "tests.tf_keras_correctness.on_hosts"
    hosts.run(module, layout, file, listed, timeout_s=1800)
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each for each in found if "error" in each] == []
    assert [each["run"] for each in found] == json.loads(listed.read_text())
    # Only tests of metrics know what is right, and have nothing to compare with.
    compared = [each["compared"] > 0 for each in found]
    assert compared == ["Metric" not in name for name, _, _ in runs]
