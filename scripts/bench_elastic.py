"""Runs whose devices and hosts change: how long without a step, and are numbers kept?

    python -m scripts.bench_elastic --part=in_process
    python -m scripts.bench_elastic --part=hosts --events=20

in_process: 20 resizes at random steps, among 1 to 4 logical CPUs. hosts: at random
instants, one of up to three hosts is killed or asked to leave, and others arrive;
beside it, two hosts that are started anew. Nothing else may run.
"""

import argparse
import json

PARTS = "in_process", "hosts"


def main() -> None:
    """Measures, and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, default="in_process")
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.part == "hosts":
        from scripts.elastic import on_hosts

        found = on_hosts.measure(options.events, options.seed)
    else:
        import towers

        towers.configure(num_gpus=4)
        from scripts.elastic import in_process

        names = "mlp", "convolutions"
        found = {name: in_process.measure(name, options.seed) for name in names}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
