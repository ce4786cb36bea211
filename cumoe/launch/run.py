"""One launch: arguments packed as the kernel's ABI says, on the caller's stream."""

from __future__ import annotations

from functools import cache
from struct import Struct

from cumoe.launch import driver
from cumoe.launch.module import function
from cumoe.plan.spec import Step


@cache
def packer(abi: str) -> Struct:
    # Native mode aligns each field as the kernel's parameters are aligned.
    return Struct("@" + abi)


def run(step: Step, device: int, stream: int, *arguments: float) -> None:
    """Launches one step on the current device. An empty grid is no launch."""
    launch = step.launch
    if launch.grid == 0:
        return
    pointer = function(step, device, stream)
    packed = packer(step.abi).pack(*arguments)
    code = driver.launch(pointer, launch.grid, launch.block, launch.smem_bytes, stream, packed)
    if code:
        driver.check(code, f"launch of {step.entry} of {step.kernel.text}")
