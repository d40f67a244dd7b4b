"""The callbacks that measure a run, put together."""

import dataclasses
from collections.abc import Callable, Sequence

import keras

from towers.callbacks.devices import DeviceReport
from towers.callbacks.starvation import Starvation
from towers.callbacks.step_time import StepTime
from towers.callbacks.throughput import Throughput


@dataclasses.dataclass(frozen=True)
class Watch:
    """What measures a run: each part answers one question.

    Attributes:
        throughput: How fast is it?
        step_time: What does a step's time go to?
        starvation: Is the input too slow, and why?
        devices: What do the devices have to do?
        fractions: The part of a full batch that each tower gets.
    """

    throughput: Throughput
    step_time: StepTime
    starvation: Starvation
    devices: DeviceReport
    fractions: Sequence[float]

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """The callbacks, to be placed before those that show what they add to logs."""
        return [self.throughput, self.step_time, self.starvation, self.devices]

    @property
    def measures(self) -> list[Callable[[], dict[str, float]]]:
        """What to write to TensorBoard; see `TensorBoard`."""
        return [part.measured for part in self.callbacks]

    def text(self) -> str:
        """Says what was measured of the whole run, in lines."""
        lines = [self.throughput.text()]
        if len(self.fractions) > 1:
            lines += [
                f"  tower {k}: {self.throughput.text(part)}, computing {busy:.0%} of "
                "the time"
                for k, (part, busy) in enumerate(
                    zip(self.fractions, self.step_time.busy(), strict=False)
                )
            ]
        lines.append(f"a step: {self.step_time.text()}")
        return "\n".join([*lines, self.devices.text()])
