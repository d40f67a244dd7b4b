"""`multi_gpu_model` with `ModelCheckpoint`: the file is a model for one device.

Run it with `python -m examples.seeds.model_checkpoint`.
Without GPUs, it runs on logical CPUs.
"""

import keras
import numpy as np

import towers


def main(path: str = "runs/best.keras") -> tuple[float, float]:
    """Prints the best loss, and the loss of the file's model; returns both."""
    towers.configure(num_gpus=2)
    keras.utils.set_random_seed(0)
    x = np.random.normal(size=(100, 8)).astype("float32")
    y = x.sum(axis=1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    parallel = towers.multi_gpu_model(model, gpus=2)
    parallel.compile(optimizer="sgd", loss="mse")
    best = keras.callbacks.ModelCheckpoint(
        path, monitor="val_loss", save_best_only=True
    )
    history = parallel.fit(
        x, y, epochs=5, validation_data=(x, y), callbacks=[best], verbose=0
    )
    smallest = min(history.history["val_loss"])
    # Plain Keras reads it, on any number of devices.
    again = keras.models.load_model(path).evaluate(x, y, verbose=0)
    print(f"best loss {smallest:.4f}; of the model in {path}: {again:.4f}")
    return smallest, again


if __name__ == "__main__":
    main()
