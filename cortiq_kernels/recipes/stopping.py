"""SIGINT, SIGTERM and SIGHUP stop a run within seconds, at a moment when nothing is lost.

    with stop_on_signals():        the first signal raises Stopped, wherever the program is
        with shielded():           except in here: it waits until the end of the block
            ...

A second signal ends the process at once, whatever it does. One that follows within `ECHO` seconds is taken for the
first again: a terminal signals the whole process group, and launchers pass on what their children already have.
SIGHUP is left alone where it is ignored (nohup), as is any signal for which the program has a handler of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO = 0.5


class Stopped(KeyboardInterrupt):
    """A signal asked the run to stop. Not an Exception, so nothing on the way swallows it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class _State:
    """What the handler knows. One a process, as handlers are."""

    installed = False
    shields = 0
    number: int | None = None
    at = 0.0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Within the context a signal raises `Stopped`, whatever the code in between makes of it. Nothing changes inside
    another such context, or off the main thread.
    """
    if _State.installed or threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}
    try:
        _State.installed = True
        for s in SIGNALS:
            held = signal.getsignal(s)
            if held in (signal.SIG_DFL, signal.default_int_handler) or (held is signal.SIG_IGN and s != signal.SIGHUP):
                before[s] = held
                signal.signal(s, _arrived)
        yield
    except (Stopped, SystemExit):
        raise
    except BaseException as e:
        if _State.number is not None:  # C code and the import machinery make other errors of what a handler raises
            raise Stopped(_State.number) from e
        raise
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        _State.installed, _State.shields, _State.number = False, 0, None


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Within the context a signal waits: what belongs together happens as a whole. Keep it short."""
    _State.shields += 1
    try:
        yield
    finally:
        _State.shields -= 1
    check()


def asked_to_stop() -> bool:
    """Whether a signal has come."""
    return _State.number is not None


def check() -> None:
    """Raise `Stopped` if a signal came that has not ended the run: one that waited, or whose exception was lost (what
    a handler raises inside a destructor is only printed).
    """
    if _State.number is not None and _State.shields == 0:
        raise Stopped(_State.number)


def _arrived(number: int, frame: object) -> None:
    now = time.monotonic()
    if _State.number is not None:
        if now - _State.at >= ECHO:
            _leave(number)
        return
    _State.number, _State.at = number, now
    if _State.shields == 0:
        raise Stopped(number)


def _leave(number: int) -> None:
    """End the process without cleaning up; what it leaves half-written has names that the next run removes."""
    with contextlib.suppress(OSError):
        cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar hides it
        os.write(2, cursor + f"stopped at once by a second {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)
