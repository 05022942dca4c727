"""Signals: where they raise, where they wait, and what a second one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from cortiq_kernels.recipes import stopping
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.interval import Interval, parse_interval
from cortiq_kernels.recipes.stopping import Stopped, check, shielded, stop_on_signals


@pytest.fixture(autouse=True)
def _nothing_ignored():
    """Under nohup SIGHUP is ignored, and an ignored signal stays so."""
    before = {s: signal.signal(s, signal.SIG_DFL) for s in stopping.SIGNALS if signal.getsignal(s) == signal.SIG_IGN}
    yield
    for s, handler in before.items():
        signal.signal(s, handler)


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_raises_at_once_and_handlers_come_back(number):
    before = [signal.getsignal(s) for s in stopping.SIGNALS]
    with pytest.raises(Stopped) as e, stop_on_signals():
        signal.raise_signal(number)
        pytest.fail("went on")
    assert e.value.number == number and str(e.value) == signal.Signals(number).name
    assert [signal.getsignal(s) for s in stopping.SIGNALS] == before
    check()  # nothing is left of it


def test_waits_for_the_end_of_a_shield():
    done = []
    with pytest.raises(Stopped), stop_on_signals():
        with shielded():
            with shielded():
                signal.raise_signal(signal.SIGTERM)
                done.append(1)
            done.append(2)
        pytest.fail("went on")
    assert done == [1, 2]


def test_what_the_code_in_between_makes_of_it_is_still_a_stop():
    """C extensions turn what a handler raises while they load into errors of their own; an error under a shield hides
    the signal that waits.
    """
    with pytest.raises(Stopped) as e, stop_on_signals():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Stopped:
            raise ImportError("initialization failed") from None
    assert isinstance(e.value.__cause__, ImportError)
    with pytest.raises(Stopped), stop_on_signals(), shielded():
        signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), stop_on_signals():
        raise ZeroDivisionError
    with pytest.raises(SystemExit), stop_on_signals():
        raise SystemExit(3)


@pytest.mark.parametrize("module", ["torch.distributions.kl", "torch._C", "cortiq_kernels.recipes.heal_plan"])
def test_signal_while_torch_is_loaded(tmp_path, module):
    """A torch that is half loaded cannot be loaded again, and must not be needed to say how to go on."""
    code = (
        "import signal, sys; from cortiq_kernels import cli\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == {module!r}: signal.raise_signal(signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Finder)\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    args = ["heal", "--student", "s", "--ce", "1", "--data", "d", "--out", str(tmp_path / "o")]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 143, done.stderr
    assert done.stderr.splitlines() == [
        "cortiq heal: stopped by SIGTERM; no output was written. Start it again with the same command."
    ]


def test_lost_exception_is_raised_again():
    """What a handler raises inside a destructor is only printed; the next check stops the run."""

    class Bad:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped), stop_on_signals():
        hook, sys.unraisablehook = sys.unraisablehook, lambda args: None
        try:
            Bad()
        finally:
            sys.unraisablehook = hook
        check()
        pytest.fail("went on")


def test_inner_context_and_own_handlers_are_left_alone():
    mine = []
    before = signal.signal(signal.SIGTERM, lambda n, f: mine.append(n))
    try:
        with stop_on_signals(), stop_on_signals():
            signal.raise_signal(signal.SIGTERM)
        assert mine == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_off_the_main_thread_nothing_happens():
    seen = []

    def work() -> None:
        with stop_on_signals(), shielded():
            seen.append(signal.getsignal(signal.SIGTERM))

    t = threading.Thread(target=work)
    t.start()
    t.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.parametrize(("wait", "status", "words"), [(0.0, 7, ""), (0.8, 130, "stopped at once by a second SIGINT")])
def test_second_signal_exits_at_once_and_an_echo_does_not(wait, status, words):
    """A cleanup of two seconds: the echo of the first signal leaves it alone, a second signal does not."""
    code = (
        "import sys, time; from cortiq_kernels.recipes.stopping import *\n"
        "try:\n"
        "    with stop_on_signals():\n"
        "        try: print('on', flush=True); time.sleep(60)\n"
        "        finally: print('cleaning', flush=True); time.sleep(2)\n"
        "except Stopped: sys.exit(7)"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == b"on\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == b"cleaning\n"
        time.sleep(wait)
        sent = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=20)
        took = time.monotonic() - sent
    assert process.returncode == status and words in err.decode()
    assert took < 1 if words else took > 1


def test_intervals():
    assert parse_interval("500") == Interval(steps=500) and parse_interval("90s") == Interval(seconds=90)
    assert parse_interval("2.5m").seconds == 150 and parse_interval("2h").seconds == 7200
    assert parse_interval("off").never
    for text in ("", "0", "0s", "-5", "10 m", "1d", "m", "5e3", "never", "٣m"):
        with pytest.raises(InputError, match=r"x: got .*; expected steps \(500\), a time .* or off\. Set --x\."):
            parse_interval(text, "x")
    steps, timed = parse_interval("3"), parse_interval("10s")
    assert [steps.due(n, 1e9) for n in (0, 2, 3)] == [False, False, True]
    assert [timed.due(n, s) for n, s in ((0, 99.0), (1, 9.0), (1, 10.0))] == [False, False, True]
    assert not parse_interval("off").due(10**6, 1e9)
