"""How a public op runs: checked and prepared once for each kind of call, then run again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from cumoe.arrays.check import Apart, apart, require_apart
from cumoe.arrays.exchange import (
    facts_of,
    host_result,
    is_torch,
    to_numpy,
    torch_facts,
    view_all,
)
from cumoe.arrays.export import Export
from cumoe.arrays.view import ArrayView
from cumoe.errors import ArgumentError
from cumoe.launch import device, driver, lending, memory
from cumoe.launch.memory import Output
from cumoe.launch.run import Launch, Prepared

Starts = tuple[int, ...]
"""Where each array starts in a line of 256 bytes; what is None, or yet to be made, starts one."""
Views = dict[str, ArrayView]
"""The arrays of a call that are not None, by name, in the op's order."""
MAX_READY = 8192
"""Calls that a thread keeps prepared, some KiB each."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """All of a checked call but its addresses. Checks are remembered, so a call is its own key."""

    options: Mapping[str, Any]
    """Keyword arguments of the reference, besides arrays."""
    launches: tuple[Launch, ...] = ()
    """On a GPU."""
    outputs: Mapping[str, Output] = field(default_factory=dict)
    """What the launches name and the caller has not given."""


class Alike(NamedTuple):
    """Calls of one op with the same scalars on arrays of the same classes."""

    viewed: tuple[str, ...]
    """The arrays that are not None, which each call views. None where all are torch's."""
    ready: dict[tuple[Any, ...], Ready]
    """By `torch_facts`, or by the `facts_of` the views."""


class Op:
    """A public op: what it needs of each room."""

    def __init__(
        self,
        arrays: tuple[str, ...],
        *,
        required: int,
        inputs: int,
        results: tuple[str, ...],
        scalars: Callable[..., Any],
        check: Callable[..., Call],
        reference: Callable[..., Any],
        in_place: bool = False,
    ) -> None:
        """
        Args:
            arrays: names of the arguments that are arrays: ``required`` ones come first, the
                ``inputs`` before the outputs.
            results: names of what is returned.
            scalars: the other arguments, each of the type that it must have, as one hashable value.
            check: from the facts of each array, `Starts` and scalars to a call, with every check
                that needs no address; remembers.
            in_place: whether the first output may be the first input.
        """
        self._arrays, self._required, self._inputs = arrays, required, inputs
        self._results, self._in_place = results, in_place
        self._scalars, self._check, self._reference = scalars, check, reference

    def __call__(self, arrays: tuple[Any, ...], scalars: tuple[Any, ...]) -> Any:
        """Runs the op: at once where this thread has run a call like it on a GPU."""
        try:
            alike = _thread.alike.get(self._kind(arrays, scalars))
        except TypeError:  # a scalar that is no key: told by name below
            alike = None
        if alike is None:
            return self._run(arrays, scalars, self._views(arrays))
        given = [a for a in arrays if a is not None]
        if alike.viewed:
            return self._run_viewed(alike, given, arrays, scalars)
        ready = None
        try:
            facts, addresses = torch_facts(given)
            ready = alike.ready.get(facts)
        except RuntimeError:
            pass  # a tensor without memory: told by name below
        if ready is None or 0 in addresses or (ready.strided and ready.is_negated(given)):
            return self._run(arrays, scalars, self._views(arrays))
        return ready(given, addresses)

    def _kind(self, arrays: tuple[Any, ...], scalars: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self, scalars, *map(type, scalars + arrays))  # True and 1 are equal

    def _views(self, arrays: tuple[Any, ...]) -> Views:
        named = {
            name: a
            for i, (name, a) in enumerate(zip(self._arrays, arrays, strict=True))
            if a is not None or i < self._required
        }
        return dict(zip(named, view_all(named.values(), tuple(named)), strict=True))

    def _run_viewed(
        self, alike: Alike, given: list[Any], arrays: tuple[Any, ...], scalars: tuple[Any, ...]
    ) -> Any:
        found = view_all(given, alike.viewed)  # keeps what is lent until all is launched
        facts, addresses = facts_of(found)
        ready = alike.ready.get(facts)
        if ready is None:
            return self._run(arrays, scalars, dict(zip(alike.viewed, found, strict=True)))
        return ready(given, addresses)

    def _run(self, arrays: tuple[Any, ...], scalars: tuple[Any, ...], views: Views) -> Any:
        plain = self._scalars(*scalars)
        named = [views.get(name) for name in self._arrays]
        facts = [None if v is None else v.facts for v in named]
        call = self._check(*facts, tuple(0 if v is None else v.start for v in named), plain)
        pairs = self._apart(views)
        given, addresses = [a for a in arrays if a is not None], [v.ptr for v in views.values()]
        require_apart(pairs, addresses, tuple(views))
        (first, *_) = views.values()
        if first.device.kind == "cpu":
            return self._compute(call, views, given)
        with device.on_device(first.device.ordinal):
            ready = self._ready(call, views, pairs)
            self._remember(ready, views, given, self._kind(arrays, scalars))
            return ready(given, addresses)

    def _apart(self, views: Views) -> tuple[Apart, ...]:
        inputs = sum(name in views for name in self._arrays[: self._inputs])
        return apart(tuple(v.facts for v in views.values()), inputs, in_place=self._in_place)

    def _compute(self, call: Call, views: Views, given: list[Any]) -> Any:
        host = {n: to_numpy(v) for n, v in views.items() if n != "workspace"}
        results = self._reference(**host, **call.options)
        many = results if isinstance(results, tuple) else (results,)
        named, (like, *_) = dict(zip(views, given, strict=True)), views.values()
        return _one_or_all(
            named[name] if name in named else host_result(result, like)
            for name, result in zip(self._results, many, strict=True)
        )

    def _ready(self, call: Call, views: Views, pairs: tuple[Apart, ...]) -> Ready:
        known = _thread.ready
        if call not in known:
            if len(known) >= MAX_READY:
                _thread.forget()
            known[call] = Ready(call, views, pairs, self._results)
        return known[call]

    def _remember(
        self, ready: Ready, views: Views, given: list[Any], kind: tuple[Any, ...]
    ) -> None:
        viewed = () if all(map(is_torch, given)) else tuple(views)
        key, _ = facts_of(views.values()) if viewed else torch_facts(given)
        with suppress(TypeError):  # a list among the scalars
            _thread.alike.setdefault(kind, Alike(viewed, {})).ready[key] = ready


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


class _Thread(threading.local):
    """What a thread has prepared."""

    def __init__(self) -> None:
        self.ready: dict[Call, Ready] = {}
        self.alike: dict[tuple[Any, ...], Alike] = {}
        """The same by op, scalars and classes."""

    def forget(self) -> None:
        """Everything."""
        self.ready.clear()
        self.alike.clear()


_thread = _Thread()
# A child has no use of its parent's GPU: `device` refuses it on the way that is not prepared.
os.register_at_fork(after_in_child=lambda: _thread.forget())


def _one_or_all(results: Iterable[Any]) -> Any:
    """A single result as it is."""
    found = tuple(results)
    return found if len(found) > 1 else found[0]
