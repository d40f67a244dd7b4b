"""The callbacks that measure a run, put together."""

import dataclasses
from collections.abc import Callable

import keras

from towers.monitoring.bottleneck.starvation import Starvation
from towers.monitoring.device_report import DeviceReport
from towers.monitoring.throughput import Throughput


@dataclasses.dataclass(frozen=True)
class Watch:
    """What measures a run: each part answers one question.

    Attributes:
        throughput: How fast is it?
        starvation: What does a step's time go to, and what is it bound by?
        devices: What do the devices have to do?
    """

    throughput: Throughput
    starvation: Starvation
    devices: DeviceReport

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """The callbacks, to be placed before those that show what they add to logs."""
        return [self.throughput, self.starvation, self.devices]

    @property
    def measures(self) -> list[Callable[[], dict[str, float]]]:
        """What to write to TensorBoard; see `TensorBoard`."""
        return [part.measured for part in self.callbacks]

    def text(self) -> str:
        """Says what was measured of the whole run, in lines."""
        lines = [self.throughput.text()]
        fractions, busy = self.throughput.fractions, self.starvation.busy()
        if len(fractions) > 1:
            lines += [
                f"  tower {k}: {self.throughput.text(part)}, computing {share:.0%} of "
                "the time"
                for k, (part, share) in enumerate(
                    zip(fractions, busy, strict=False), self.throughput.first_tower
                )
            ]
        rate = self.throughput.examples_per_sec
        lines += [f"  {each}" for each in self.starvation.hosts_text(rate)]
        if step := self.starvation.text():
            lines.append(f"a step: {step}")
        return "\n".join([*lines, self.devices.text()])
