"""What slows a GPU down, or will: errors of its memory, heat, power, and its links."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from towers.machine.nvml import Driver
from towers.program import words

# The first generation of GPUs that has TensorFloat-32.
_AMPERE = 8
# Why clocks are lower than they could be; NVML's names, and what to look at.
_SLOW = {
    "SwPowerCap": "its power limit lowers its clocks",
    "HwThermalSlowdown": "heat lowers its clocks; look at its fans and the room",
    "SwThermalSlowdown": "heat lowers its clocks; look at its fans and the room",
    "HwPowerBrakeSlowdown": "the power supply lowers its clocks",
}


def notes(
    driver: Driver, index: int, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Says what is to be known of a GPU, a sentence each.

    Args:
        driver: What to ask. Whatever it does not tell is left out.
        index: The driver's number of the GPU.
        environ: The environment of programs that would use it.
    """
    handle = driver.ask(lambda nvml: nvml.nvmlDeviceGetHandleByIndex(index), None)
    sources = (_memory_errors, _clocks, _pcie, _nvlink)
    said = [text for note in sources for text in note(driver, handle)]
    return [*dict.fromkeys(said), *_tf32(driver, handle, environ)]


def _memory_errors(driver: Driver, handle: Any) -> Iterator[str]:
    errors = driver.ask(
        lambda nvml: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
        ),
        0,
    )
    if errors:
        yield (
            f"ECC has found {words.count(errors, 'error')} of its memory that it could "
            "not correct; have the GPU examined if there are more"
        )
    rows = driver.ask(lambda nvml: nvml.nvmlDeviceGetRemappedRows(handle), None)
    retired = driver.ask(
        lambda nvml: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle), 0
    )
    if rows is not None and rows[3]:
        yield "it could not replace bad rows of its memory; have the GPU exchanged"
    elif retired or (rows is not None and rows[2]):
        yield "bad parts of its memory wait to be replaced; start the machine anew"


def _clocks(driver: Driver, handle: Any) -> Iterator[str]:
    def ask(nvml):
        try:
            return nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        except nvml.NVMLError:  # before driver 535
            return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)

    reasons = driver.ask(ask, 0)
    found = [text for name, text in _SLOW.items() if reasons & _bit(driver, name)]
    yield from found
    # Older GPUs do not tell which of them it is.
    if not found and reasons & _bit(driver, "HwSlowdown"):
        yield "heat or the power supply lowers its clocks"


def _bit(driver: Driver, name: str) -> int:
    return driver.ask(lambda nvml: getattr(nvml, f"nvmlClocksThrottleReason{name}"), 0)


def _pcie(driver: Driver, handle: Any) -> Iterator[str]:
    now = driver.ask(lambda nvml: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle), 0)
    most = driver.ask(lambda nvml: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle), 0)
    if 0 < now < most:
        yield (
            f"PCIe has {now} of {most} lanes, so batches travel more slowly; look at "
            "the slot"
        )


def _nvlink(driver: Driver, handle: Any) -> Iterator[str]:
    states = []
    for link in range(driver.ask(lambda nvml: nvml.NVML_NVLINK_MAX_LINKS, 0)):
        state = driver.ask(
            lambda nvml, link=link: nvml.nvmlDeviceGetNvLinkState(handle, link), None
        )
        if state is None:
            break  # it has no more, or none
        states.append(state)
    down = states.count(0)
    if 0 < down < len(states):
        yield f"{down} of its {len(states)} NVLinks are down"
    elif down:
        yield f"none of its {down} NVLinks is up, so GPUs talk over PCIe"


def _tf32(driver: Driver, handle: Any, environ: Mapping[str, str]) -> Iterator[str]:
    major, _ = driver.ask(
        lambda nvml: nvml.nvmlDeviceGetCudaComputeCapability(handle), (0, 0)
    )
    if major < _AMPERE:
        return
    if environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        yield "TF32 is off, as NVIDIA_TF32_OVERRIDE=0: float32 is exact and slower"
    else:
        yield (
            "TF32 is on: float32 matrix products keep 10 bits of each factor's "
            "fraction; NVIDIA_TF32_OVERRIDE=0 turns it off"
        )
