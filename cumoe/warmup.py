"""Loading ahead: every kernel of a model onto a GPU, so that any call can be captured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from cumoe.errors import ArgumentError, UnsupportedDeviceError
from cumoe.models import Selection, selected_layers
from cumoe.plan.spec import Step


def warmup(
    steps: Iterable[Step] = (),
    *,
    device: int | None = None,
    everything: bool = False,
    **selection: Unpack[Selection],
) -> int:
    """Makes every kernel that a model's layers reach launchable on a GPU.

    A call of these layers can then be captured in a CUDA graph at once, with any number of tokens.
    Kernels that `cumoe.prebuild` has not built are compiled now. Nothing is launched.

    Args:
        steps: launches of a plan, as `cumoe.plan.enumerate` gives them; beside a selection.
        device: number of the GPU; by default CuPy's current one.
        everything, selection: as in `cumoe.prebuild`.

    Returns: the number of kernel entries that were not loaded before.

    Raises:
        UnsupportedDeviceError: there is no GPU, or no kernel for it.
        KernelNotBuiltError: a kernel is not built, and CUMOE_DISABLE_JIT=1.
        ArgumentError, CheckpointError, CompileError: as `cumoe.prebuild`.
    """
    from cumoe.launch import device as devices
    from cumoe.launch import module
    from cumoe.plan import enumerate as plans

    layers, given = selected_layers(selection), tuple(steps)
    if not layers and not given:
        raise ArgumentError("warmup: want a model, a config, sizes or steps, got none of them")
    ordinal = _ordinal(device)
    info = devices.info(ordinal)
    every = plans.all_steps if everything else plans.serving_steps
    found = [step for layer in layers for step in every(info, layer)]
    return module.load(dict.fromkeys([*given, *found]), ordinal)


def _ordinal(device: int | None) -> int:
    from cumoe.launch import device as devices

    count = devices.device_count()
    if count == 0:
        raise UnsupportedDeviceError(
            "warmup: want a CUDA device to load kernels on, found none; call it in the process "
            "that runs them, and cumoe.prebuild on a machine without a GPU"
        )
    ordinal: int = devices.cupy().cuda.runtime.getDevice() if device is None else device
    if not 0 <= ordinal < count:
        raise UnsupportedDeviceError(
            f"warmup: want device from 0 to {count - 1}, got {ordinal}; see CUDA_VISIBLE_DEVICES"
        )
    return ordinal
