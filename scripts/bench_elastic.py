"""Runs whose devices change: how long without a step, and are numbers kept?

    python -m scripts.bench_elastic

20 resizes at random steps, among 1 to 4 logical CPUs. Nothing else may run.
"""

import argparse
import json

import towers


def main() -> None:
    """Measures, and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    towers.configure(num_gpus=4)
    from scripts.elastic import in_process

    names = "mlp", "convolutions"
    found = {name: in_process.measure(name, options.seed) for name in names}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
