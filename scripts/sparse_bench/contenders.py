"""Who multiplies: the contenders' names, and the modules that run them."""

import dataclasses

YARDSTICK = "keras_dense"


@dataclasses.dataclass(frozen=True)
class Contender:
    """One contender.

    Attributes:
        label: What tables call it.
        module: The module of this package that runs it; those of one module share a
            process.
        dense: The contender of the same module that has all blocks, or a product of
            it.
    """

    label: str
    module: str
    dense: str


def _ours(pattern):
    return Contender(f"BlockSparseDense, {pattern}", "keras_layers", YARDSTICK)


CONTENDERS = {
    YARDSTICK: Contender("Keras Dense", "keras_layers", YARDSTICK),
    "block_diagonal": _ours("block_diagonal"),
    "butterfly": _ours("butterfly"),
    "monarch": _ours("monarch"),
    "local_strided": _ours("local_strided"),
    "random": _ours("random"),
    "erdos_renyi": _ours("erdos_renyi"),
    "barabasi_albert": _ours("barabasi_albert"),
    "tf_csr": Contender("TensorFlow CSR", "keras_layers", YARDSTICK),
    "torch_dense": Contender("PyTorch dense", "torch_bsr", "torch_dense"),
    "torch_bsr": Contender(
        "PyTorch BSR, gathered gradient", "torch_bsr", "torch_dense"
    ),
    "torch_bsr_dense": Contender(
        "PyTorch BSR, dense gradient", "torch_bsr", "torch_dense"
    ),
    "numpy_dense": Contender("NumPy dense", "scipy_bsr", "numpy_dense"),
    "scipy_bsr": Contender("SciPy BSR", "scipy_bsr", "numpy_dense"),
}


def by_module(names: list[str]) -> dict[str, tuple[str, ...]]:
    """Returns the contenders of each module, the dense one first, ours before all."""
    modules = dict.fromkeys(
        [CONTENDERS[YARDSTICK].module, *(CONTENDERS[n].module for n in names)]
    )
    return {
        module: tuple(
            name
            for name, each in CONTENDERS.items()
            if each.module == module and (name in names or name == each.dense)
        )
        for module in modules
    }
