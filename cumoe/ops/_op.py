"""How a public op runs: checked and prepared once for each kind of call, then run again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cumoe.arrays.check import Apart, apart, require_apart
from cumoe.arrays.exchange import (
    facts_of,
    host_result,
    is_torch,
    to_numpy,
    torch_facts,
    view_all,
)
from cumoe.arrays.guard import in_lines, torch_guard
from cumoe.launch import device
from cumoe.launch.memory import Output
from cumoe.launch.run import Launch
from cumoe.ops._ready import Ready, Views

Starts = tuple[int, ...]
"""Where each array starts in a line of 256 bytes; what is None, or yet to be made, starts one."""
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


class Alike:
    """Calls of one op with the same scalars on arrays of the same classes."""

    __slots__ = ("guards", "last", "ready", "viewed")

    def __init__(self, viewed: tuple[str, ...]) -> None:
        """``viewed``: the arrays that are not None, which each call views; empty for torch's."""
        self.viewed = viewed
        self.ready: dict[tuple[Any, ...], Ready] = {}
        """By `torch_facts`, or by the `facts_of` the views."""
        self.guards: dict[tuple[Any, ...], Callable[..., bool] | None] = {}
        """Of tensors that start lines, by `torch_facts`."""
        self.last: tuple[Callable[..., bool], Ready] | None = None
        """What tells that a call is like the last one on such tensors, and that one."""

    def expect(self, facts: tuple[Any, ...], ready: Ready, given: list[Any]) -> None:
        """That the next call is like this one."""
        said_no = self.last is not None and self.last[1] is ready  # made in another mode of torch
        if said_no or facts not in self.guards:
            self.guards[facts] = torch_guard(given)
        guard = self.guards[facts]
        self.last = None if guard is None else (guard, ready)


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
        if alike.last is not None:
            is_like, ready = alike.last
            if is_like(*given) and in_lines(addresses := [a.data_ptr() for a in given]):
                return ready(given, addresses)
        return self._run_torch(alike, given, arrays, scalars)

    def _kind(self, arrays: tuple[Any, ...], scalars: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self, scalars, *map(type, scalars + arrays))  # True and 1 are equal

    def _views(self, arrays: tuple[Any, ...]) -> Views:
        named = {
            name: a
            for i, (name, a) in enumerate(zip(self._arrays, arrays, strict=True))
            if a is not None or i < self._required
        }
        return dict(zip(named, view_all(named.values(), tuple(named)), strict=True))

    def _run_torch(
        self, alike: Alike, given: list[Any], arrays: tuple[Any, ...], scalars: tuple[Any, ...]
    ) -> Any:
        ready = None
        try:
            facts, addresses = torch_facts(given)
            ready = alike.ready.get(facts)
        except RuntimeError:
            pass  # a tensor without memory: told by name below
        if ready is None or 0 in addresses or (ready.strided and ready.is_negated(given)):
            return self._run(arrays, scalars, self._views(arrays))
        if in_lines(addresses):
            alike.expect(facts, ready, given)
        return ready(given, addresses)

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
            _thread.alike.setdefault(kind, Alike(viewed)).ready[key] = ready


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
