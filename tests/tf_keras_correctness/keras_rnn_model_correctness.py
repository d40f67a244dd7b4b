# Copyright 2019 The TensorFlow Authors. All Rights Reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
#
# From tf_keras/distribute/keras_rnn_model_correctness_test.py
# of keras-team/tf-keras, commit dd0a7237b9b2. Changed for Towers; see the README.
# ==============================================================================
"""Correctness tests for tf.keras RNN models using DistributionStrategy."""

import keras
import numpy as np

from tests.tf_keras_correctness import keras_correctness_base


class _DistributionStrategyRnnModelCorrectnessTest(
    keras_correctness_base.TestDistributionStrategyEmbeddingModelCorrectnessBase
):
    def _get_layer_class(self):
        raise NotImplementedError

    def get_model(
        self,
        max_words=10,
        initial_weights=None,
        distribution=None,
        input_shapes=None,
    ):
        del input_shapes
        rnn_cls = self._get_layer_class()

        word_ids = keras.layers.Input(shape=(max_words,), dtype=np.int32, name="words")
        word_embed = keras.layers.Embedding(input_dim=20, output_dim=10)(word_ids)
        rnn_embed = rnn_cls(units=4, return_sequences=False)(word_embed)

        dense_output = keras.layers.Dense(2)(rnn_embed)
        preds = keras.layers.Softmax(dtype="float32")(dense_output)
        model = keras.Model(inputs=[word_ids], outputs=[preds])

        if initial_weights:
            model.set_weights(initial_weights)

        optimizer_fn = keras.optimizers.SGD

        model = keras_correctness_base.maybe_on_towers(model, distribution)
        model.compile(
            optimizer=optimizer_fn(learning_rate=0.1),
            loss="sparse_categorical_crossentropy",
            metrics=["sparse_categorical_accuracy"],
        )
        return model


class DistributionStrategyGruModelCorrectnessTest(
    _DistributionStrategyRnnModelCorrectnessTest
):
    def _get_layer_class(self):
        return keras.layers.GRU

    def test_gru_model_correctness(self, distribution, use_numpy, use_validation_data):
        self.run_correctness_test(distribution, use_numpy, use_validation_data)


class DistributionStrategyLstmModelCorrectnessTest(
    _DistributionStrategyRnnModelCorrectnessTest
):
    def _get_layer_class(self):
        return keras.layers.LSTM

    def test_lstm_model_correctness(self, distribution, use_numpy, use_validation_data):
        self.run_correctness_test(distribution, use_numpy, use_validation_data)

    def test_lstm_model_correctness_mixed_precision(
        self, distribution, use_numpy, use_validation_data
    ):
        with keras_correctness_base.policy_scope("mixed_float16"):
            self.run_correctness_test(distribution, use_numpy, use_validation_data)
