"""The live view of a run, on stderr: a progress bar on a terminal, plain lines anywhere else.

Plain lines carry no control character, and there are few of them: of steps and ticks at most one each `every` seconds
(and the last), of every other kind the first `MANY`; what runs longer than that gets a line of a kind for each further
hundredth of its time. A run of a week stays below a thousand lines a kind.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from typing import IO, Any

MANY = 200
# Control characters but the newline, line and paragraph separators, lone surrogates, and what no XML may hold.
_CONTROL = re.compile("[\0-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    """`text` without control characters, which could move the cursor or start a line: \\x1b for an escape."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def seconds(s: float) -> str:
    """A duration for people: 8s, 3m20s, 2h05m."""
    s = round(s)
    if s < 60:
        return f"{s}s"
    return f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


def number(x: float | None, digits: int = 4) -> str:
    """A measured value: fixed digits, or 'not finite'."""
    return "not finite" if x is None or x != x or abs(x) == float("inf") else f"{x:.{digits}f}"


def line(e: dict[str, Any]) -> str | None:
    """One line of text for an event; None for those that have none."""
    kind = e["event"]
    if kind == "plan":
        return plan_line(e)
    if kind == "resume":
        return e["text"]
    if kind == "note":
        return f"note: {e['text']}"
    if kind == "tick":
        return f"{e['phase']}: {e['done']}/{e['of']}" + (f"  {tick_numbers(e)}" if "tokens_per_s" in e else "")
    if kind == "step":
        return f"step {e['step']}/{e['of']}  {step_numbers(e)}  {seconds(e['left_s'])} left"
    if kind == "skip":
        return (
            f"step {e['step']} skipped: loss {number(e['loss'])}, |g| {number(e['norm'], 3)} "
            f"({e['in_row']} in a row, {e['skipped']} in all)"
        )
    if kind == "eval":
        best = "best so far" if e["improved"] else f"best {number(e['best'])} at step {e['best_step']}"
        closed = f"; {e['pruned']:.1%} closed, pressure {e['l1']:.4g}" if "pruned" in e else ""
        if e["best_step"] is None:
            best = "none so far" if e["step"] else "all open"
        closed += baked(e) if "perplexity" in e else ""
        return f"held-out {e['loss_name']} {number(e['loss'])} after step {e['step']}/{e['of']} ({best}){closed}"
    if kind == "write":
        return f"writing {e['out']}"
    return None


def baked(e: dict[str, Any]) -> str:
    """What an evaluation of bake says besides."""
    text = f"; perplexity {number(e['perplexity'], 3)}, lowest so far {number(e['bottom'], 3)}"
    if e.get("newly"):
        more = f" and {e['newly'] - len(e['closed'])} more" if e["newly"] > len(e["closed"]) else ""
        text += f"; newly closed {', '.join(e['closed'])}{more}"
    return text + (f"; {e['resurrected']} kept by align" if e.get("resurrected") else "")


def tick_numbers(e: dict[str, Any]) -> str:
    """Speed and time left of a phase that says them."""
    return f"{e['tokens_per_s']:,.0f} tokens/s  {seconds(e['left_s'])} left"


def step_numbers(e: dict[str, Any]) -> str:
    """Loss, gradient norm, rate and speed of a step."""
    return (
        f"{e['loss_name']} {number(e['loss'])}  |g| {number(e['norm'], 3)}  rate {e['rate']:.2e}  "
        f"{e['seconds']:.2f} s/step  {e['tokens_per_s']:,.0f} tokens/s"
    )


def plan_line(e: dict[str, Any]) -> str:
    """Where and in what precision a run works, and why."""
    head = f"{e['recipe']} on {e['device']} ({e['device_reason']}), {e['dtype']} ({e['dtype_reason']})"
    return f"{head}, {e['steps']} steps" if "steps" in e else head


class PlainView:
    """Lines to a stream that is not a terminal. A stream whose reader has gone is left alone: the run goes on."""

    def __init__(self, stream: IO[str], every: float = 10.0, clock: Callable[[], float] = time.monotonic):
        self.stream, self.every, self.clock = stream, every, clock
        self._began = clock()
        self._gone = False
        self._last: dict[str, float] = {}
        self._shown: dict[str, int] = {}

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __call__(self, e: dict[str, Any]) -> None:
        """Show one event, if its turn has come."""
        text = line(e)
        if text is None or self._gone or not self._turn(e):
            return
        try:
            self.stream.write(clean(text.replace("\n", "; ")) + "\n")
            self.stream.flush()
        except OSError:
            self._gone = True

    def _turn(self, e: dict[str, Any]) -> bool:
        kind, now = e["event"], self.clock()
        frequent = kind in ("step", "tick")
        shown = self._shown.get(kind, 0)
        wait = max(self.every, (now - self._began) / 100) if frequent or shown >= MANY else 0.0
        done = e.get("done", e.get("step"))
        last = "of" in e and done == e["of"]
        if not last and now - self._last.get(kind, float("-inf")) < wait:
            return False
        self._last[kind], self._shown[kind] = now, shown + 1
        return True


class LiveView:
    """A progress bar of the current phase with the time left, the step's numbers below it (so both fit 80 columns),
    evaluations and notes above. A terminal that has gone is left alone: the run goes on.
    """

    def __init__(self, stream: IO[str]):
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.text import Text

        class Lasting(Console):
            def on_broken_pipe(self) -> None:  # rich would end the program
                self.quiet = True

        self.console = Lasting(file=stream, highlight=False)
        name, left = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[left]"))
        self.progress = Progress(name, BarColumn(), MofNCompleteColumn(), left)
        self.numbers = Text()
        self.live = Live(Group(self.progress, self.numbers), console=self.console, transient=True, refresh_per_second=4)
        self._phase: str | None = None
        self._task: Any = None
        self._began = 0.0

    def __enter__(self) -> LiveView:
        self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self.live.stop()

    def __call__(self, e: dict[str, Any]) -> None:
        """Show one event."""
        with contextlib.suppress(OSError):
            self._show(e)

    def _show(self, e: dict[str, Any]) -> None:
        if e["event"] == "tick":
            left = e["left_s"] if "left_s" in e else self._left(e["phase"], e["done"], e["of"])
            speed = f"{e['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in e else ""
            self._bar(e["phase"], e["done"], e["of"], left, speed)
        elif e["event"] == "step":
            self._bar("train", e["step"], e["of"], e["left_s"], step_numbers(e))
        else:
            text = line(e)
            if text is not None:
                self.console.print(clean(text), markup=False, soft_wrap=True)

    def _left(self, phase: str, done: int, of: int) -> float | None:
        now = time.monotonic()
        if phase != self._phase:
            self._began = now
            return None
        return (now - self._began) / max(done - 1, 1) * (of - done)

    def _bar(self, phase: str, done: int, of: int, left: float | None, numbers: str) -> None:
        if phase != self._phase:
            if self._task is not None:
                self.progress.remove_task(self._task)
            self._phase, self._task = phase, self.progress.add_task(clean(phase), total=of, left="")
        self.progress.update(self._task, completed=done, left="" if left is None else f"{seconds(left)} left")
        self.numbers.plain = numbers


def view_for(stream: IO[str]) -> PlainView | LiveView:
    """The live view on a terminal that can move its cursor, plain lines elsewhere."""
    able = stream.isatty() and os.environ.get("TERM", "dumb").lower() not in ("", "dumb", "unknown")
    return LiveView(stream) if able else PlainView(stream)
