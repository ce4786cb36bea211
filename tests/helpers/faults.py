"""File calls that go wrong: stand-ins for `os` and `fcntl` inside the modules under test."""

from __future__ import annotations

import fcntl
import os
import types
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

Fault = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets a call (name, function, arguments) and does something else, or more."""


class FileCalls:
    """Counts the calls of functions of `os` and `fcntl`, and hands some of them to a fault."""

    def __init__(self, fault: Fault | None = None, at: Callable[[int], bool] = bool) -> None:
        self.names: list[str] = []
        self._fault, self._at = fault, at

    def install(self, modules: Iterable[types.ModuleType], put: Callable[..., Any]) -> None:
        """Puts stand-ins in the place of what `modules` import, by `put(module, name, value)`."""
        for module in modules:
            for name, real in (("os", os), ("fcntl", fcntl)):
                if hasattr(module, name):
                    put(module, name, _StandIn(real, self))

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = len(self.names)
        self.names.append(name)
        if self._fault is None or not self._at(number):
            return function(*args, **kwargs)
        return self._fault(name, function, args, kwargs)


class _StandIn:
    def __init__(self, real: types.ModuleType, calls: FileCalls) -> None:
        self._real, self._calls = real, calls

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        return partial(self._calls.call, name, value) if callable(value) else value


def failing(error: int) -> Fault:
    """The call does nothing and fails; a close does close."""

    def fail(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name == "close":
            function(*args, **kwargs)
        raise OSError(error, os.strerror(error))

    return fail


def failing_late(error: int) -> Fault:
    """The call does its work, and fails: as where the answer of a file server is lost."""

    def fail(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if name == "open":
            os.close(result)
        raise OSError(error, os.strerror(error))

    return fail
