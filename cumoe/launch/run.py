"""Launches on the caller's stream: prepared once by a thread, run with new addresses each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_float, c_int64, c_uint64
from typing import Any, NamedTuple

from cumoe.launch import driver
from cumoe.launch.module import function
from cumoe.launch.tensor_map import Encoded
from cumoe.plan.spec import Step
from cumoe.plan.tensor_map import TensorMap

_STORAGE: dict[str, Callable[[Any], driver.Storage]] = {"P": c_uint64, "q": c_int64, "f": c_float}
"""Of an argument, by its letter in the ABI."""


class At(NamedTuple):
    """An argument that each call has anew: an address in one of its arrays."""

    array: str
    offset: int = 0
    """In bytes."""


Argument = float | At | TensorMap


class Launch(NamedTuple):
    """A step and its arguments, in the order of its ABI."""

    step: Step
    arguments: tuple[Argument, ...]


class Prepared:
    """A sequence of launches whose kernels are loaded and whose arguments lie in memory.

    A call only writes its addresses there. The driver reads them while the thread waits: a thread
    prepares its own.
    """

    __slots__ = ("_addresses", "_derived", "_fire", "_launchers", "_maps", "_steps", "_stream")

    def __init__(
        self, launches: Sequence[Launch], arrays: Sequence[str], device: int, stream: int
    ) -> None:
        """On the current device. An empty grid is no launch.

        Raises: KernelNotBuiltError if the stream is being captured and a kernel is not loaded yet.
        """
        launches = [launch for launch in launches if launch.step.launch.grid]
        self._steps = [launch.step for launch in launches]
        functions = [function(step, device, stream) for step in self._steps]
        slots = _slots(launches, arrays)
        self._derived = [(arrays.index(at.array), at.offset) for at in slots][len(arrays) :]
        self._addresses = (c_uint64 * len(slots))()
        self._maps: list[tuple[Encoded, int]] = []
        """And which of the addresses each one is of."""
        self._launchers = [
            driver.Launcher(f, step.launch, [self._place(a, kind, slots) for a, kind in arguments])
            for f, step, arguments in zip(
                functions, self._steps, map(_with_letters, launches), strict=True
            )
        ]
        self._fire = [launcher.fire for launcher in self._launchers]
        self._stream = 0

    def _place(self, argument: Argument, kind: str, slots: dict[At, int]) -> driver.Storage:
        if isinstance(argument, TensorMap):
            encoded = Encoded(argument)
            self._maps.append((encoded, slots[_address_of(argument)]))
            return encoded.storage
        if isinstance(argument, At):
            return c_uint64.from_buffer(self._addresses, 8 * slots[argument])
        return _STORAGE[kind](argument)

    def __call__(self, stream: int, addresses: list[int]) -> None:
        """Launches all on the current device, with the addresses of the arrays in their order."""
        if self._derived:
            addresses = addresses + [addresses[i] + offset for i, offset in self._derived]
        self._addresses[:] = addresses  # type: ignore[assignment]
        if stream != self._stream:
            self._move_to(stream)
        for encoded, slot in self._maps:
            encoded.point_at(addresses[slot])
        for fire in self._fire:
            if code := fire():
                self._refuse(fire, code)

    def _move_to(self, stream: int) -> None:
        for launcher in self._launchers:
            launcher.config.stream = stream
        self._stream = stream

    def _refuse(self, fire: Callable[[], int], code: int) -> None:
        step = self._steps[self._fire.index(fire)]
        driver.check(code, f"launch of {step.entry} of {step.kernel.text}")


def _with_letters(launch: Launch) -> list[tuple[Argument, str]]:
    """Each argument with its letter."""
    return list(zip(launch.arguments, launch.step.abi, strict=True))


def _slots(launches: Sequence[Launch], arrays: Sequence[str]) -> dict[At, int]:
    """Where each address is written: first those of the arrays, then others inside of them."""
    arguments = (a for launch in launches for a in launch.arguments)
    inner = (_address_of(a) for a in arguments if isinstance(a, At | TensorMap))
    return {at: i for i, at in enumerate(dict.fromkeys([*map(At, arrays), *inner]))}


def _address_of(argument: At | TensorMap) -> At:
    return At(argument.array, argument.offset)
