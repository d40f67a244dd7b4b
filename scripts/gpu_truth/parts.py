"""The parts: what is tested and measured on GPUs, in order."""

import dataclasses
import os
from collections.abc import Iterator, Sequence

# What a tower with 128 images of 224 x 224 takes in 16 bits, in MB.
IMAGENET_TOWER_MB = 11_000
SMALL_TOWER_MB = 2_000
LARGE_TOWER_MB = 8_000
TOWERS = 2
BENCH = "scripts/bench_towers.py"
PYTEST = (
    *("-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "tests/test_gpu.py", "-q"),
    *("--durations=0", "--junitxml={out}/junit.xml"),
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The GPUs of a machine.

    Attributes:
        gpus: How many there are.
        name: Of the first one.
        memory_mb: Of each, in MB.
        driver: Version of NVIDIA's driver.
    """

    gpus: int = 0
    name: str = "no GPU"
    memory_mb: int = 0
    driver: str = "none"


@dataclasses.dataclass(frozen=True)
class Part:
    """One program.

    Attributes:
        name: What it is called; also its folder.
        about: What it shows.
        command: What Python runs; `{out}` stands for the part's folder.
        limit_s: Most seconds it may take.
        beside_others: Whether it measures no time, so that others may run meanwhile.
        environ: What is added to the environment.
    """

    name: str
    about: str
    command: tuple[str, ...]
    limit_s: int
    beside_others: bool = False
    environ: tuple[tuple[str, str], ...] = ()


def of(machine: Machine) -> list[Part]:
    """Returns the parts for a machine, in the order in which they run."""
    return [*_tests(machine), *_timings(machine)]


def _on_cpu(machine):
    return () if machine.gpus else (("TOWERS_GPU_TESTS_ON_CPU", "1"),)


def _tests(machine: Machine) -> Iterator[Part]:
    workers = min(14, os.cpu_count())
    several = f"--numprocesses={workers}", "--dist=worksteal"
    yield Part(
        "tests",
        "pytest -m gpu, without the search for the largest batch",
        (*PYTEST, *several, "-k", "not largest_batch"),
        200 if machine.gpus else 1_800,
        True,
        _on_cpu(machine),
    )
    yield Part("doctor", "towers doctor", ("-m", "towers.doctor"), 100, True)


def _timings(machine: Machine) -> Iterator[Part]:
    for builder in ("parameter_server", "replicated"):
        yield _trace(f"towers:{builder}", "resnet50_224", IMAGENET_TOWER_MB)
    yield from _race(
        machine,
        "resnet50_fp16",
        "ResNet-50, 2 x 128 at 224",
        "resnet50_224",
        [
            *("one_device+xla", "towers:parameter_server", "mirrored"),
            *("one_device", "towers:replicated", "towers:parameter_server+xla"),
        ],
        IMAGENET_TOWER_MB,
        limit_s=280,
        steps=10,
    )
    yield from _race(
        machine,
        "mlp",
        "MLP, 2 x 32",
        "mlp",
        [
            *("one_device", "one_device+xla", "one_device@10", "mirrored"),
            *("loop_by_hand", "towers:parameter_server", "towers:replicated"),
            "towers:parameter_server?local_parameter_device=cpu",
            *("towers:parameter_server@10", "towers:parameter_server+xla@10"),
            *("towers:parameter_server?prefetch=0", "towers"),
            "towers:parameter_server?jit_compile=auto",
        ],
    )
    yield from _race(
        machine,
        "embedding",
        "table of 10,000,000 x 64, 2 x 128",
        "embedding_10m",
        [
            *("one_device", "mirrored", "towers:parameter_server"),
            "towers:parameter_server/rows",
        ],
        LARGE_TOWER_MB,
    )
    yield from _race(
        machine,
        "resnet56",
        "ResNet-56 on CIFAR's shape, 2 x 64",
        "resnet56",
        [
            *("one_device+xla", "one_device", "mirrored", "loop_by_hand"),
            *("towers:parameter_server", "towers:replicated"),
            "towers:parameter_server?local_parameter_device=cpu",
            *("towers:parameter_server@10", "towers:parameter_server+xla"),
        ],
    )
    lm = ["one_device+xla", "towers:parameter_server", "towers:parameter_server+xla"]
    peers = ["one_device", "mirrored", "loop_by_hand"]
    for work, about, contenders in [
        ("lm_bf16", "transformer, 2 x 16 x 512 tokens", [*lm, *peers]),
        ("lm_bf16_dropout", "the same with dropout", lm),
        ("lm_bf16_unknown_rows", "the same, rows not known", lm),
    ]:
        yield from _race(machine, work, about, work, contenders, LARGE_TOWER_MB)
    yield from _race(
        machine,
        "resnet50_fp16_ways",
        "ResNet-50, other ways",
        "resnet50_224",
        [
            *("one_device+xla", "loop_by_hand", "towers:parameter_server@10"),
            "towers:parameter_server?local_parameter_device=cpu",
            "towers:parameter_server?prefetch=0",
            "towers:parameter_server?jit_compile=auto",
            "towers",
        ],
        IMAGENET_TOWER_MB,
        limit_s=280,
        steps=10,
    )
    yield Part(
        "largest_batch",
        "find_batch_size against out-of-memory",
        (*PYTEST, "-k", "largest_batch"),
        240,
        environ=_on_cpu(machine),
    )
    few = ["one_device+xla", "towers:parameter_server", "mirrored"]
    for work in ("resnet50_224_bf16", "resnet50_224_frozen"):
        yield from _race(
            machine, work, "ResNet-50", work, few, IMAGENET_TOWER_MB, 240, steps=10
        )
    for builder in ("parameter_server", "replicated"):
        yield _trace(f"towers:{builder}", "mlp", SMALL_TOWER_MB)
    if machine.gpus > 1:
        algorithms = ("nccl", "ring", "device", "cpu")
        ways = [f"towers:replicated?all_reduce_alg={name}" for name in algorithms]
        yield from _race(
            machine,
            "all_reduce",
            "ResNet-50, ways to add gradients",
            "resnet50_224",
            ["mirrored", *ways],
            IMAGENET_TOWER_MB,
            limit_s=280,
            steps=10,
        )


def _race(
    machine: Machine,
    name: str,
    about: str,
    work: str,
    contenders: Sequence[str],
    tower_mb: int = SMALL_TOWER_MB,
    limit_s: int = 150,
    steps: int | None = None,
) -> Iterator[Part]:
    """Yields races of as many contenders as fit the GPUs; the first is in each."""
    together = (
        *("--start_together", f"--start_seconds={limit_s // 2}"),
        f"--max_seconds={limit_s - 40}",
    )
    reference, *others = contenders
    at_once = len(others)
    if machine.gpus:
        room = machine.memory_mb * min(machine.gpus, TOWERS)
        at_once = max(1, min(at_once, int(room // (TOWERS * tower_mb * 1.05)) - 1))
    for i in range(0, len(others), at_once):
        yield Part(
            name if i == 0 else f"{name}_{i // at_once + 1}",
            about,
            (
                *(BENCH, f"--work={work}", f"--towers={TOWERS}", "--verbosity=1"),
                f"--contenders={','.join([reference, *others[i : i + at_once]])}",
                *(together if machine.gpus else ()),
                f"--gpu_memory_limit_mb={tower_mb}",
                *("--rounds=7", "--json={out}/figures.jsonl"),
                *((f"--steps={steps}",) if steps else ()),
            ),
            limit_s if machine.gpus else 20 * limit_s,
        )


def _trace(contender: str, work: str, tower_mb: int) -> Part:
    """Returns a part that records and reads a profile."""
    return Part(
        f"trace_{work}_{contender.replace(':', '_')}",
        f"profile of {contender} on {work}",
        (
            *("-m", "scripts.gpu_truth.trace", f"--work={work}"),
            *(f"--contender={contender}", f"--gpu_memory_limit_mb={tower_mb}"),
            "--output={out}",
        ),
        90,
    )
