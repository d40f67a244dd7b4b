"""How well `towers scaling` predicts the speed of longer runs, and if it is right.

    python -m scripts.bench_scaling [--models=mlp,resnet20,lm] [--seconds=20]

For each model, `towers scaling` tries 1 to 4 logical CPUs for 5 seconds each, and then
the same towers train for longer. Nothing else may run meanwhile.
"""

import argparse
import json
import subprocess
import sys

MODELS = {
    "mlp": ("--model=mlp", "--dataset=synthetic:32x32x3:10:8192", "--batch_size=512"),
    "resnet20": (
        *("--model=resnet20", "--dataset=synthetic:32x32x3:10:2048"),
        "--batch_size=64",
    ),
    "lm": (
        *("--model=transformer_lm", "--task=language_model"),
        *(
            "--model_options=layers=2,width=128",
            "--sequence_length=64",
            "--batch_size=32",
        ),
    ),
}
TOWERS = 4


def scale(flags: tuple[str, ...], seconds: float, rounds: int) -> dict:
    """Runs `towers scaling`, and returns what it found."""
    command = [
        *(sys.executable, "-m", "towers.scaling", *flags, f"--num_gpus={TOWERS}"),
        *(f"--seconds={seconds}", f"--rounds={rounds}", "--json"),
        "--variable_update=parameter_server",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def even(found: dict) -> dict[int, float]:
    """Returns examples/s by the number of towers with equal parts."""
    return {
        len(each["towers"]): each["examples_per_sec"]
        for each in found["trials"]
        if len({*each["split_ratios"]}) == 1
    }


def main() -> None:
    """Measures, and prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    for name in options.models.split(","):
        short = scale(MODELS[name], 5, rounds=3)
        longer = scale(MODELS[name], options.seconds, rounds=3)
        predicted, measured = even(short), even(longer)
        for count, speed in predicted.items():
            off = speed / measured[count] - 1
            print(
                f"{name}, {count} towers: predicted {speed:,.0f} examples/s, measured "
                f"{measured[count]:,.0f}: {off:+.1%}"
            )
        best, chosen = max(measured.values()), short["recommended"]
        reached = measured[chosen] / best
        right = chosen == longer["recommended"]
        print(
            f"{name}: {short['recommendation']} It reaches {reached:.1%} of the best; "
            f"longer runs recommend {longer['recommended']}: "
            f"{'right' if right else 'wrong'}. Serial fraction "
            f"{short['serial_fraction']:.2f} +- {short['serial_fraction_error']:.2f}.",
            flush=True,
        )


if __name__ == "__main__":
    main()
