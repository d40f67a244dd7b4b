"""The parts: what is tested and measured on GPUs, in order."""

import dataclasses
import os
from collections.abc import Iterator

# What a tower with 128 images of 224 x 224 takes in 16 bits, in MB.
IMAGENET_TOWER_MB = 11_000
SMALL_TOWER_MB = 2_000
LARGE_TOWER_MB = 8_000
TOWERS = 2
BENCH = "scripts/bench_towers.py"
PYTEST = (
    *("-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-q", "--durations=0"),
    "--junitxml={out}/junit.xml",
)
ALONE = "tests/test_gpu_alone.py"
PHOTOS = "-m", "scripts.gpu_truth.photos", "--output={out}"


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
        command: What Python runs; `{out}` stands for the part's folder, and `{seconds}`
            for the seconds that it has.
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
        "pytest -m gpu: tests that share a GPU",
        (*PYTEST, *several, "tests/test_gpu.py"),
        200 if machine.gpus else 1_800,
        True,
        _on_cpu(machine),
    )
    yield Part("doctor", "towers doctor", ("-m", "towers.doctor"), 100, True)


@dataclasses.dataclass(frozen=True)
class Race:
    """Contenders that train in turn.

    Attributes:
        name: Of its part.
        about: What is trained.
        contenders: Who trains; the first is what others are compared with.
        work: What is trained, in `bench.works`. By default the name.
        tower_mb: Memory of a logical GPU, in MB.
        limit_s: Most seconds it may take.
        steps: Steps of a round. None: the work's own.
        rounds: How many there are.
    """

    name: str
    about: str
    contenders: tuple[str, ...]
    work: str | None = None
    tower_mb: int = SMALL_TOWER_MB
    limit_s: int = 150
    steps: int | None = None
    rounds: int = 7


_SERVER = "towers:parameter_server"
_ON_CPU = f"{_SERVER}?device=cpu"
_XLA = "one_device+xla", _SERVER, f"{_SERVER}+xla"
_FEW = "one_device+xla", f"{_SERVER}+xla", "mirrored"
_IMAGENET = {"tower_mb": IMAGENET_TOWER_MB, "limit_s": 280, "steps": 10}
_SENT = _IMAGENET | {"steps": 100, "rounds": 5}
RACES = [
    Race(
        "resnet50_uint8",
        "ResNet-50, 2 x 128 at 224, batches of uint8 scaled on the GPU",
        ("one_device+xla", f"{_SERVER}+xla"),
        work="resnet50_224_uint8",
        **_SENT,
    ),
    Race(
        "resnet50_kept",
        "the same, of pictures that stay on the GPU",
        ("one_device+xla", f"{_SERVER}+xla"),
        work="resnet50_224_kept",
        **_SENT,
    ),
    Race(
        "resnet50_float32",
        "the same, batches of float32",
        ("one_device+xla", f"{_SERVER}+xla"),
        work="resnet50_224",
        **_SENT,
    ),
    Race(
        "resnet50_fp16",
        "ResNet-50, 2 x 128 at 224",
        (*_XLA, "mirrored", "towers:replicated"),
        work="resnet50_224",
        **_IMAGENET,
    ),
    Race(
        "mlp",
        "MLP, 2 x 32",
        (
            *("one_device", "one_device+xla", "one_device@10", "mirrored"),
            *("loop_by_hand", _SERVER, "towers:replicated", _ON_CPU),
            *(f"{_SERVER}@10", f"{_SERVER}+xla@10", f"{_SERVER}?prefetch=0", "towers"),
            f"{_SERVER}?jit_compile=auto",
        ),
    ),
    Race(
        "embedding_10m",
        "table of 10,000,000 x 64, 2 x 128",
        ("one_device", "mirrored", _SERVER, f"{_SERVER}/rows"),
        tower_mb=LARGE_TOWER_MB,
    ),
    Race(
        "resnet56",
        "ResNet-56 on images of CIFAR's shape, 2 x 64",
        (
            *(*_XLA, "mirrored", "loop_by_hand", "towers:replicated"),
            *(_ON_CPU, f"{_SERVER}@10"),
        ),
    ),
    Race(
        "lm_bf16",
        "transformer, 2 x 16 x 512 tokens",
        (*_XLA, "one_device", "mirrored", "loop_by_hand"),
        tower_mb=LARGE_TOWER_MB,
    ),
    Race("lm_bf16_dropout", "the same with dropout", _XLA, tower_mb=LARGE_TOWER_MB),
    Race("lm_bf16_unknown_rows", "rows not known", _XLA, tower_mb=LARGE_TOWER_MB),
    Race(
        "resnet50_fp16_ways",
        "ResNet-50, other ways",
        (
            *("one_device+xla", "loop_by_hand", f"{_SERVER}@10", _ON_CPU, "towers"),
            *(f"{_SERVER}?prefetch=0", f"{_SERVER}?jit_compile=auto"),
        ),
        work="resnet50_224",
        **_IMAGENET,
    ),
    Race("resnet50_224_bf16", "ResNet-50 in bfloat16", _FEW, **_IMAGENET),
    Race("resnet50_224_frozen", "frozen batch normalization", _FEW, **_IMAGENET),
]
ALL_REDUCE = Race(
    "all_reduce",
    "ResNet-50, ways to add gradients",
    (
        "mirrored",
        *(
            f"towers:replicated?all_reduce={name}"
            for name in ("nccl", "ring", "device", "cpu")
        ),
    ),
    work="resnet50_224",
    **_IMAGENET,
)


def _timings(machine: Machine) -> Iterator[Part]:
    traced = [f"towers:{builder}" for builder in ("parameter_server", "replicated")]
    yield from (_trace(each, "resnet50_224", IMAGENET_TOWER_MB) for each in traced)
    for race in [*RACES, *([ALL_REDUCE] if machine.gpus > 1 else [])]:
        yield from _parts_of(race, machine)
    yield from (_trace(each, "mlp", SMALL_TOWER_MB) for each in traced)
    yield Part(
        "second_start",
        "second start with XLA's results at hand",
        (
            *("-m", "scripts.gpu_truth.second_start", f"--towers={TOWERS}"),
            f"--work={'resnet50_224' if machine.gpus else 'mlp'}",
            *(f"--gpu_memory_limit_mb={IMAGENET_TOWER_MB}", "--output={out}"),
        ),
        420 if machine.gpus else 300,
    )
    yield Part(
        "alone",
        "who holds the GPU, memory, utilization, queue, scaling",
        (*PYTEST, ALONE, "-k", "not largest_batch"),
        240 if machine.gpus else 900,
        environ=_on_cpu(machine),
    )
    yield Part(
        "photos",
        "ResNet-50 on JPEG files: does the input keep up?",
        (*PHOTOS, *_photos(machine)),
        240,
    )
    yield from _decoding(machine)
    yield Part(
        "largest_batch",
        "find_batch_size against out-of-memory",
        (*PYTEST, ALONE, "-k", "largest_batch"),
        240,
        environ=_on_cpu(machine),
    )


def _decoding(machine: Machine) -> Iterator[Part]:
    """Yields the part that decodes on GPUs; it needs `nvidia-dali-cuda120`."""
    few = () if machine.gpus else ("--photos=64", "--batch_size=16", "--cores=1")
    yield Part(
        "decoding",
        "JPEG files decoded on the GPU: images/s, and pixels against the CPU's",
        ("-m", "scripts.gpu_truth.decoding", "--output={out}", *few),
        120 if machine.gpus else 600,
    )


def _photos(machine):
    """Yields flags of the photographs, and behind -- those of the run."""
    if not machine.gpus:
        yield from ("--photos=32", "--", "--num_gpus=2", "--batch_size=4")
        yield "--max_train_steps=3"
        return
    yield from ("--", "--dtype=fp16", "--batch_size=256", "--max_train_steps=80")
    yield from ("--enable_xla=true", "--variable_update=parameter_server")
    if machine.gpus < TOWERS:
        yield from ("--num_gpus=1", f"--gpu_split={TOWERS}")
        yield f"--gpu_memory_limit_mb={IMAGENET_TOWER_MB}"
    else:
        yield f"--num_gpus={TOWERS}"


def _parts_of(race: Race, machine: Machine) -> Iterator[Part]:
    """Yields races of as many contenders as fit the GPUs; the first is in each."""
    reference, *others = race.contenders
    at_once, limit_s, on_gpu = len(others), race.limit_s, ()
    if machine.gpus:
        room = machine.memory_mb * min(machine.gpus, TOWERS)
        fits = int(room // (TOWERS * race.tower_mb * 1.05))
        at_once = max(1, min(at_once, fits - 1))
        on_gpu = (
            *("--start_together", f"--start_seconds={limit_s // 2}"),
            "--max_seconds={seconds}",
        )
    else:
        # Two cores are slower, and start one contender after another.
        limit_s *= 20
    for i in range(0, len(others), at_once):
        contenders = [reference, *others[i : i + at_once]]
        yield Part(
            race.name if i == 0 else f"{race.name}_{i // at_once + 1}",
            race.about,
            (
                *(BENCH, f"--work={race.work or race.name}", f"--towers={TOWERS}"),
                f"--contenders={','.join(contenders)}",
                f"--gpu_memory_limit_mb={race.tower_mb}",
                *(
                    "--verbosity=1",
                    f"--rounds={race.rounds}",
                    "--json={out}/figures.jsonl",
                ),
                *((f"--steps={race.steps}",) if race.steps else ()),
                *on_gpu,
            ),
            limit_s,
        )


def _trace(contender: str, work: str, tower_mb: int) -> Part:
    """Returns a part that records and reads a profile."""
    return Part(
        f"trace_{work}_{contender.replace(':', '_')}",
        f"profile of {contender} on {work}",
        (
            *("-m", "scripts.gpu_truth.record", f"--work={work}"),
            *(f"--contender={contender}", f"--gpu_memory_limit_mb={tower_mb}"),
            "--output={out}",
        ),
        90,
    )
