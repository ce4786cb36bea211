"""A checked call prepared: its thread runs it again and again with other addresses."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from cumoe.arrays.check import Apart, require_apart
from cumoe.arrays.export import Export
from cumoe.arrays.view import ArrayView
from cumoe.errors import ArgumentError
from cumoe.launch import device, driver, lending, memory
from cumoe.launch.run import Prepared

if TYPE_CHECKING:
    from cumoe.ops._op import Call

Views = dict[str, ArrayView]
"""The arrays of a call that are not None, by name, in the op's order."""


class Ready:
    """A call that its thread can run at once, with other addresses."""

    __slots__ = (
        "_address", "_beside_torch", "_current_device", "_device", "_exported", "_is_pooled",
        "_makers", "_names", "_pairs", "_prepared", "_results", "_scratch", "_stream", "strided",
    )  # fmt: skip

    def __init__(
        self, call: Call, views: Views, pairs: tuple[Apart, ...], results: tuple[str, ...]
    ) -> None:
        """On the current device."""
        (like, *_), names = views.values(), (*views, *call.outputs)
        self._device, self._names, self._pairs = like.device.ordinal, tuple(views), pairs
        self._current_device, self._stream, self._address = memory.ways(like.framework)
        self._makers = [
            memory.maker(like.framework, like.device, output) for output in call.outputs.values()
        ]
        stream = self._stream(self._device)
        self._prepared = Prepared(call.launches, names, self._device, stream)
        self._results = itemgetter(*(names.index(name) for name in results))
        made = [(names.index(name), name in results, o.dtype) for name, o in call.outputs.items()]
        self._scratch = [i for i, is_result, _ in made if not is_result]
        self._exported = [
            (i, dtype) for i, is_result, dtype in made if is_result and like.framework == "dlpack"
        ]
        self._is_pooled = bool(call.outputs) and like.framework != "torch"
        lent = [name for name, v in views.items() if v.framework == "dlpack"]
        self._beside_torch = lent[0] if lent and like.framework == "torch" else None
        self.strided = tuple(i for i, v in enumerate(views.values()) if not v.facts.is_row_major)

    def is_negated(self, tensors: list[Any]) -> bool:
        """Whether a tensor has its negative bit set that may have it: see `view`."""
        return any(tensors[i].is_neg() for i in self.strided)

    def __call__(self, arrays: list[Any], addresses: list[int]) -> Any:
        """Launches; both lists grow by the outputs. Returns the one result, or a tuple of all."""
        require_apart(self._pairs, addresses, self._names)
        if self._current_device() != self._device:
            with device.on_device(self._device):
                return self._launch(arrays, addresses)
        return self._launch(arrays, addresses)

    def _launch(self, arrays: list[Any], addresses: list[int]) -> Any:
        stream = self._stream(self._device)
        if self._beside_torch is not None:
            _require_same_stream(self._beside_torch, stream, self._device)
        if self._is_pooled and lending.is_capturing(stream):
            with driver.relaxed_capture():  # CuPy's pool may ask CUDA for more
                self._make(arrays, addresses)
            _of_graphs.extend([arrays[i] for i in self._scratch])
        else:
            self._make(arrays, addresses)
        self._prepared(stream, addresses)
        for i, dtype in self._exported:
            arrays[i] = Export(arrays[i], dtype, arrays[0]).delivered()
        return self._results(arrays)

    def _make(self, arrays: list[Any], addresses: list[int]) -> None:
        for make in self._makers:
            made = make()
            arrays.append(made)
            addresses.append(self._address(made))


_of_graphs: list[Any] = []
"""What captured calls made for themselves, and each replay of their graphs writes. torch keeps a
pool for each graph; CuPy would hand the memory out again, and knows of no graph's end."""


def _require_same_stream(name: str, stream: int, ordinal: int) -> None:
    """Refuses what was lent on CuPy's stream to kernels that run on torch's."""
    lent = memory.ways("cupy").current_stream(ordinal)
    legacy = lending.LEGACY_STREAM
    if (lent or legacy) != (stream or legacy):
        raise ArgumentError(
            f"{name}: want an array lent by DLPack on torch's current stream, {stream:#x}, as the "
            f"first array is torch's, got CuPy's current stream, {lent:#x}; call inside of "
            f"`with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):`"
        )
