"""Blocking work off the caller's thread, on threads that do not keep the process: opening a session may hang inside the
runtime for ever, and a thread there can be neither interrupted nor waited for.

`concurrent.futures` would be less code, but its executors are joined when the interpreter ends, whatever they wait for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

T = TypeVar("T")

CLOSE_TIMEOUT_S: Final = 5.0
"""How long `close` waits for the work under way, as the compute worker does."""


def in_own_thread(work: Callable[[], T], *, name: str) -> Future[T]:
    """Do this in a thread of its own, called `name`; the future cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=_perform, args=(work, future), name=name, daemon=True).start()
    return future


class Background:
    """One thread that does what it is handed, in turn. Thread-safe; `close` once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do this when what was submitted before is done; RuntimeError once closed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            self._waiting.put((work, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        return future

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Cancel what waits, give the work under way `timeout_s` to end, and take nothing more. Blocking."""
        with self._lock:
            self._closed = True
        try:
            while (entry := self._waiting.get_nowait()) is not None:
                entry[1].cancel()
        except queue.Empty:
            pass
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _serve(self) -> None:
        while (entry := self._waiting.get()) is not None:
            work, future = entry
            if future.set_running_or_notify_cancel():
                _perform(work, future)
            del entry, work, future  # an idle thread must not keep a segment


def _perform(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # whatever it is belongs to the one who waits; the thread lives
        future.set_exception(error)
