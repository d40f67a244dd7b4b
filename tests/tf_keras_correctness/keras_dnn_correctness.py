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
# From tf_keras/distribute/keras_dnn_correctness_test.py
# of keras-team/tf-keras, commit dd0a7237b9b2. Changed for Towers; see the README.
# ==============================================================================
"""Correctness tests for tf.keras DNN model using DistributionStrategy."""

import keras
import numpy as np
import tensorflow as tf

from tests.tf_keras_correctness import keras_correctness_base


class TestDistributionStrategyDnnCorrectness(
    keras_correctness_base.TestDistributionStrategyCorrectnessBase
):
    def get_model(self, initial_weights=None, distribution=None, input_shapes=None):
        # We add few non-linear layers to make it non-trivial.
        model = keras.Sequential()
        model.add(keras.layers.Dense(10, activation="relu", input_shape=(1,)))
        model.add(
            keras.layers.Dense(
                10,
                activation="relu",
                kernel_regularizer=keras.regularizers.l2(1e-4),
            )
        )
        model.add(keras.layers.Dense(10, activation="relu"))
        model.add(keras.layers.Dense(1))

        if initial_weights:
            model.set_weights(initial_weights)

        model = keras_correctness_base.maybe_on_towers(model, distribution)
        model.compile(
            loss=keras.losses.mean_squared_error,
            optimizer=keras.optimizers.SGD(0.05),
            metrics=["mse"],
        )
        return model

    def get_data(self):
        x_train = np.random.rand(9984, 1).astype("float32")
        y_train = 3 * x_train
        x_predict = np.array([[1.0], [2.0], [3.0], [4.0]], dtype=np.float32)
        return x_train, y_train, x_predict

    def get_data_with_partial_last_batch(self):
        x_train = np.random.rand(10000, 1).astype("float32")
        y_train = 3 * x_train
        x_eval = np.random.rand(10000, 1).astype("float32")
        y_eval = 3 * x_eval
        x_predict = np.array([[1.0], [2.0], [3.0], [4.0]], dtype=np.float32)
        return x_train, y_train, x_eval, y_eval, x_predict

    def get_data_with_partial_last_batch_eval(self):
        x_train = np.random.rand(9984, 1).astype("float32")
        y_train = 3 * x_train
        x_eval = np.random.rand(10000, 1).astype("float32")
        y_eval = 3 * x_eval
        x_predict = np.array([[1.0], [2.0], [3.0], [4.0]], dtype=np.float32)
        return x_train, y_train, x_eval, y_eval, x_predict

    def test_dnn_correctness(self, distribution, use_numpy, use_validation_data):
        self.run_correctness_test(distribution, use_numpy, use_validation_data)

    def test_dnn_correctness_with_partial_last_batch_eval(
        self, distribution, use_numpy, use_validation_data
    ):
        self.run_correctness_test(
            distribution,
            use_numpy,
            use_validation_data,
            partial_last_batch="eval",
        )

    def test_dnn_correctness_with_partial_last_batch(
        self, distribution, use_numpy, use_validation_data
    ):
        self.run_correctness_test(
            distribution,
            use_numpy,
            use_validation_data,
            partial_last_batch="train_and_eval",
            training_epochs=1,
        )

    def test_dnn_with_dynamic_learning_rate(self, distribution):
        self.run_dynamic_lr_test(distribution)


class TestDistributionStrategyDnnMetricCorrectness(
    keras_correctness_base.TestDistributionStrategyCorrectnessBase
):
    def get_model(self, distribution=None, input_shapes=None):
        model = keras.Sequential()
        model.add(keras.layers.Dense(1, input_shape=(1,), kernel_initializer="ones"))
        model = keras_correctness_base.maybe_on_towers(model, distribution)
        model.compile(
            loss=keras.losses.mean_squared_error,
            optimizer=keras.optimizers.SGD(0.05),
            metrics=[keras.metrics.BinaryAccuracy()],
        )
        return model

    def run_metric_correctness_test(self, distribution):
        with self.cached_session():
            self.set_up_test_config()

            x_train, y_train, _ = self.get_data()
            model = self.get_model(distribution=distribution)

            batch_size = 64
            train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
            train_dataset = keras_correctness_base.batch_wrapper(
                train_dataset, batch_size
            )

            history = model.fit(x=train_dataset, epochs=2, steps_per_epoch=10)
            self.assertEqual(history.history["binary_accuracy"], [1.0, 1.0])

    def test_simple_dnn_metric_correctness(self, distribution):
        self.run_metric_correctness_test(distribution)


class TestDistributionStrategyDnnMetricEvalCorrectness(
    keras_correctness_base.TestDistributionStrategyCorrectnessBase
):
    def get_model(self, distribution=None, input_shapes=None):
        model = keras.Sequential()
        model.add(
            keras.layers.Dense(
                3, activation="relu", input_dim=4, kernel_initializer="ones"
            )
        )
        model.add(
            keras.layers.Dense(1, activation="sigmoid", kernel_initializer="ones")
        )
        model = keras_correctness_base.maybe_on_towers(model, distribution)
        model.compile(
            loss="mae",
            metrics=["accuracy", keras.metrics.BinaryAccuracy()],
            optimizer=keras.optimizers.SGD(0.001),
        )
        return model

    def run_eval_metrics_correctness_test(self, distribution):
        with self.cached_session():
            self.set_up_test_config()

            model = self.get_model(distribution=distribution)

            # verify correctness of stateful and stateless metrics.
            x = np.ones((100, 4)).astype("float32")
            y = np.ones((100, 1)).astype("float32")
            dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
            dataset = keras_correctness_base.batch_wrapper(dataset, 4)
            outs = model.evaluate(dataset, steps=10)
            self.assertEqual(outs[1], 1.0)
            self.assertEqual(outs[2], 1.0)

            y = np.zeros((100, 1)).astype("float32")
            dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
            dataset = keras_correctness_base.batch_wrapper(dataset, 4)
            outs = model.evaluate(dataset, steps=10)
            self.assertEqual(outs[1], 0.0)
            self.assertEqual(outs[2], 0.0)

    def test_identity_model_metric_eval_correctness(self, distribution):
        self.run_eval_metrics_correctness_test(distribution)


class SubclassedModel(keras.Model):
    def __init__(self, initial_weights, input_shapes):
        super().__init__()
        self.dense1 = keras.layers.Dense(10, activation="relu", input_shape=(1,))
        self.dense2 = keras.layers.Dense(
            10,
            activation="relu",
            kernel_regularizer=keras.regularizers.l2(1e-4),
        )
        self.dense3 = keras.layers.Dense(10, activation="relu")
        self.dense4 = keras.layers.Dense(1)
        # In Keras 3, `build` makes no variables of layers that only `call` knows.
        self(keras.Input((1,)))
        if initial_weights:
            self.set_weights(initial_weights)

    def call(self, inputs):
        x = self.dense1(inputs)
        x = self.dense2(x)
        x = self.dense3(x)
        return self.dense4(x)


class TestDistributionStrategyDnnCorrectnessWithSubclassedModel(
    TestDistributionStrategyDnnCorrectness
):
    def get_model(self, initial_weights=None, distribution=None, input_shapes=None):
        model = SubclassedModel(initial_weights, input_shapes)

        model = keras_correctness_base.maybe_on_towers(model, distribution)
        model.compile(
            loss=keras.losses.mean_squared_error,
            optimizer=keras.optimizers.SGD(0.05),
            metrics=["mse"],
        )
        return model
