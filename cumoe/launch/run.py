"""One launch: arguments packed as the kernel's ABI says, on the caller's stream."""

from __future__ import annotations

import threading

from cumoe.launch import driver
from cumoe.launch.module import function
from cumoe.plan.spec import Step


class _Launchers(threading.local):
    """A thread's own launchers: the driver reads a launcher's memory while the thread waits."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, str, int], driver.Launcher] = {}


_launchers = _Launchers()


def run(step: Step, device: int, stream: int, *arguments: float) -> None:
    """Launches one step on the current device. An empty grid is no launch."""
    kernel, entry, launch, _ = step
    if launch.grid == 0:
        return
    launcher = _launchers.made.get((kernel.text, entry, device))
    if launcher is None:
        launcher = _make(step, device, stream)
    code = launcher(launch.grid, stream, arguments)
    if code:
        driver.check(code, f"launch of {entry} of {kernel.text}")


def _make(step: Step, device: int, stream: int) -> driver.Launcher:
    launch = step.launch
    launcher = driver.Launcher(
        function(step, device, stream),
        launch.block,
        launch.smem_bytes,
        step.abi,
        overlap=launch.overlap,
    )
    _launchers.made[step.kernel.text, step.entry, device] = launcher
    return launcher
