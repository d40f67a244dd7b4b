"""Backbones of keras-hub, small and with random weights, on towers: as on one device.

Needs the extra [hub].
"""

import keras
import numpy as np
import pytest

from towers import multi_gpu_model

hub = pytest.importorskip("keras_hub").models

pytestmark = pytest.mark.slow

ROWS, STEPS, VOCABULARY, SIDE = 4, 8, 31, 32

# Arguments of backbones: as small as they can be.
_BERT = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
}
_LENGTH = {"max_sequence_length": STEPS}
_DECODER = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
    "hidden_dim": 8,
    "intermediate_dim": 16,
}
SMALL = {
    # The four that everybody knows.
    "GPT2": _BERT | _LENGTH | {"dropout": 0.0},
    "Bert": _BERT | _LENGTH | {"dropout": 0.0},
    "Llama": _DECODER,
    "ViT": {
        "image_shape": (SIDE, SIDE, 3),
        "patch_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 8,
        "mlp_dim": 16,
        "dropout_rate": 0.0,
    },
    "Albert": _BERT | _LENGTH | {"embedding_dim": 4, "dropout": 0.0},
    "Bart": _BERT | _LENGTH | {"dropout": 0.0},
    "Bloom": _BERT | {"dropout": 0.0},
    "DebertaV3": _BERT | _LENGTH | {"bucket_size": 4, "dropout": 0.0},
    "DistilBert": _BERT | _LENGTH | {"dropout": 0.0},
    "Electra": {
        "vocab_size": VOCABULARY,
        **{name: size for name, size in _BERT.items() if name != "vocabulary_size"},
        **_LENGTH,
        "embedding_dim": 4,
        "dropout": 0.0,
    },
    "ESM": {
        **_BERT,
        "max_wavelength": 100,
        "dropout": 0.0,
        "pad_token_id": 0,
    },
    "Falcon": {
        "vocabulary_size": VOCABULARY,
        "num_layers": 2,
        "num_attention_heads": 2,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "attention_dropout_rate": 0.0,
        "feedforward_dropout_rate": 0.0,
    },
    "FNet": {
        "vocabulary_size": VOCABULARY,
        "num_layers": 2,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "dropout": 0.0,
        **_LENGTH,
    },
    "Gemma": _DECODER | {"head_dim": 4},
    "GPTNeoX": _BERT | {"hidden_dim": 16, "max_sequence_length": STEPS, "dropout": 0.0},
    "Llama3": _DECODER,
    "Mistral": _DECODER,
    "OPT": _BERT | _LENGTH | {"dropout": 0.0},
    "Phi3": _DECODER,
    "Qwen": _DECODER,
    "Qwen3": _DECODER | {"head_dim": 4},
    "RoformerV2": _BERT | {"head_size": 4, "max_wavelength": 100, "dropout": 0.0},
    "Roberta": _BERT | _LENGTH | {"dropout": 0.0},
    "XLMRoberta": _BERT | _LENGTH | {"dropout": 0.0},
}


def _inputs(backbone):
    """Random inputs of a backbone, by name or alone."""
    random = np.random.default_rng(0)

    def made(tensor):
        shape = [ROWS, *(STEPS if n is None else n for n in tensor.shape[1:])]
        if "int" in tensor.dtype or "bool" in tensor.dtype:
            if "mask" in tensor.name:
                mask = np.ones(shape, tensor.dtype)
                mask[1:, -2:] = 0
                return mask
            most = 2 if "segment" in tensor.name else VOCABULARY
            return random.integers(0 if most == 2 else 1, most, shape, tensor.dtype)
        return random.normal(size=shape).astype(tensor.dtype)

    return keras.tree.map_structure(made, backbone.input)


def _network(name):
    keras.utils.set_random_seed(0)
    backbone = getattr(hub, f"{name}Backbone")(**SMALL[name])
    outputs = keras.tree.flatten(backbone.output)
    # Each output that is a number, of a token or a pixel, gets two logits.
    floats = [each for each in outputs if "float" in each.dtype]
    logits = [keras.layers.Dense(2)(each) for each in floats]
    return backbone, keras.Model(
        backbone.input, logits[0] if len(logits) == 1 else logits
    )


def _trained(name, towers):
    backbone, network = _network(name)
    x = _inputs(backbone)
    random = np.random.default_rng(1)
    y = [
        random.normal(size=[ROWS, *(n or STEPS for n in each.shape[1:])])
        for each in network.outputs
    ]
    model = multi_gpu_model(network, gpus=towers) if towers else network
    before = [variable.numpy() for variable in network.trainable_variables]
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=None, jit_compile=False)
    loss = model.train_on_batch(x, y[0] if len(y) == 1 else y)
    after = [variable.numpy() for variable in network.trainable_variables]
    return loss, [b - a for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize("name", SMALL)
def test_a_step_equals_that_of_one_device(name, capsys):
    ours, changes = _trained(name, 2)
    said = capsys.readouterr().err
    assert "cannot be read" not in said and "gathered outputs" not in said
    theirs, expected = _trained(name, 0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    # Relative to the largest change: some gradients are zero but for rounding.
    largest = max(np.abs(change).max() for change in expected)
    assert largest > 0
    for ours, theirs in zip(changes, expected, strict=True):
        assert np.abs(ours - theirs).max() <= 2e-5 * largest
