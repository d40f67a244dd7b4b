#!/usr/bin/env bash
# Tries a wheel as a new user would: in an empty environment of each Python, elsewhere.
#
#   scripts/try_wheel.sh dist/keras_towers-0.3.0-py3-none-any.whl python3.11 python3.12
set -euo pipefail
wheel=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PYTHONPATH='' CUDA_VISIBLE_DEVICES=''
path=$PATH start=$PWD
for python in "${@:2}"; do
  # As the caller has them: the last Python's environment is not in the way.
  PATH=$path
  cd "$start"
  rm -rf "$folder"
  echo "== $("$python" --version): $wheel"
  "$python" -m venv "$folder/.venv"
  cd "$folder"
  PATH=$folder/.venv/bin:$path
  pip install --quiet "$wheel"
  pip check
  towers --version
  towers doctor
  towers train --train_epochs=1 --num_gpus=2
  python - <<'PYTHON'
import json, towers

towers.configure(num_gpus=2)

import keras, numpy as np

x = np.linspace(-1, 1, 256, dtype="float32")[:, None]
layers = keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)
model = keras.Sequential([keras.Input((1,)), *layers])
parallel = towers.multi_gpu_model(model, gpus=2)
parallel.compile(keras.optimizers.Adam(0.01), loss="mse")
parallel.fit(x, x**2, batch_size=32, epochs=50, verbose=0)
loss = parallel.evaluate(x, x**2, verbose=0)
keras.utils.save_img("digit.png", np.eye(8)[:, :, None])
with open("runs/digits_cnn/summary.json") as file:
    accuracy = json.load(file)["val_accuracy"]
print(f"multi_gpu_model: loss {loss:.4f}; towers train: accuracy {accuracy:.2f}")
assert loss < 0.01 and accuracy > 0.5, (loss, accuracy)
PYTHON
  towers predict runs/digits_cnn digit.png
  towers export runs/digits_cnn exported
done
