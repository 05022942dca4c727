"""Charts as inline SVG, of our own: lines over steps, and bars. No script, nothing from outside.

Each is an image to a screen reader (role, title, description). Colours are CSS variables of the page, so that they
follow light and dark. The same values give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from cortiq_kernels.report import scale
from cortiq_kernels.report.scale import Scale

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 76, 32, 28, 46
MOST_POINTS = 360  # of a line; a longer one is drawn as means of equal ranges of steps, with a band from least to most

Points = Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """A point that is named in the chart."""

    x: float
    y: float
    text: str


def line_chart(
    key: str, title: str, about: str, points: Points, *, last: int, unit: str, dots: bool = False,
    mark: Mark | None = None, ticks_at: Sequence[float] = (), ticks_text: str = "", log: bool = True,
) -> str:  # fmt: skip
    """One line over steps 0 .. `last`.

    points    (step, value); a value that is not finite breaks the line
    unit      text at the vertical axis
    dots      a dot at each point (where they are few)
    mark      a point to name, such as the best
    ticks_at  steps to mark at the bottom, explained by `ticks_text`
    log       a logarithmic axis where the values span a factor of 50
    """
    finite = [y for _, y in points if math.isfinite(y)]
    if not finite:
        return f'<p class="none">{escape(title)}: nothing was measured.</p>'
    x = scale.steps_axis(last, LEFT, WIDTH - RIGHT)
    bottom = HEIGHT - BOTTOM
    spans = log and min(finite) > 0 and max(finite) > 50 * min(finite)
    y = scale.logarithmic(finite, bottom, TOP) if spans else scale.linear(finite, bottom, TOP)
    body = [_axes(x, y, unit + (", logarithmic" if spans else ""))]
    for run in _runs(points):
        if len(run) > MOST_POINTS:
            low, mean, high = _thinned(run)
            band = [*low, *reversed(high)]
            body.append(f'<polygon class="band" points="{_path(band, x, y)}"/>')
            run = mean
        if len(run) > 1:
            body.append(f'<polyline class="line" points="{_path(run, x, y)}"/>')
        if dots and len(run) <= 120 or len(run) == 1:
            body += [f'<circle class="dot" cx="{x.at(px):.1f}" cy="{y.at(py):.1f}" r="3"><title>step {px:,.0f}: '
                     f"{scale.short(py)}</title></circle>" for px, py in run]  # fmt: skip
    for at in ticks_at:
        body.append(f'<path class="skip" d="M{x.at(at):.1f} {bottom}v-9"/>')
    if ticks_at:
        body.append(f'<text class="skip-text" x="{WIDTH - RIGHT}" y="{TOP - 12}" text-anchor="end">'
                    f"{escape(ticks_text)}</text>")  # fmt: skip
    if mark is not None and math.isfinite(mark.y):
        body.append(_named(mark, x, y))
    return _figure(key, title, about, body, HEIGHT)


def bar_chart(key: str, title: str, about: str, bars: Sequence[tuple[str, float]], unit: str) -> str:
    """Bars from 0, one a label, with their labels below as far as there is room."""
    if not bars:
        return f'<p class="none">{escape(title)}: nothing was measured.</p>'
    y = scale.linear([0.0, *(v for _, v in bars)], HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / len(bars)
    every = max(1, math.ceil(max(len(label) for label, _ in bars) * 8 / room))
    body = [_axes(None, y, unit)]
    for i, (label, value) in enumerate(bars):
        left, top = LEFT + i * room, y.at(value)
        place = f'x="{left + room * 0.1:.1f}" y="{top:.1f}" width="{room * 0.8:.1f}" height="{y.at(0.0) - top:.1f}"'
        body.append(f'<rect class="bar" {place}><title>{escape(label)}: {scale.short(value)}</title></rect>')
        if i % every == 0:
            body.append(f'<text class="tick" x="{left + room / 2:.1f}" y="{HEIGHT - BOTTOM + 18}" '
                        f'text-anchor="middle">{escape(label)}</text>')  # fmt: skip
    return _figure(key, title, about, body, HEIGHT)


def _figure(key: str, title: str, about: str, body: Sequence[str], height: int) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption>\n<div class="scroll">'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{key}-title {key}-about">\n'
        f'<title id="{key}-title">{escape(title)}</title>\n<desc id="{key}-about">{escape(about)}</desc>\n'
        + "\n".join(body)
        + "\n</svg></div>\n"
        + f'<p class="about">{escape(about)}</p></figure>'
    )


def _axes(x: Scale | None, y: Scale, unit: str) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    out = [f'<text class="unit" x="{LEFT - 8}" y="{TOP - 12}">{escape(unit)}</text>']
    for t, label in zip(y.ticks, y.labels, strict=True):
        at = y.at(t)
        out.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{right}"/>')
        out.append(f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    out.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    if x is not None:
        for t, label in zip(x.ticks, x.labels, strict=True):
            at = x.at(t)
            out.append(f'<path class="axis" d="M{at:.1f} {bottom}v5"/>')
            out.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
        out.append(f'<text class="unit" x="{right}" y="{HEIGHT - 8}" text-anchor="end">step</text>')
    return "\n".join(out)


def _named(mark: Mark, x: Scale, y: Scale) -> str:
    """A ring around a point; its text is above the plot, where no line can cross it."""
    return (
        f'<circle class="best" cx="{x.at(mark.x):.1f}" cy="{y.at(mark.y):.1f}" r="6"/>'
        f'<circle class="best" cx="{WIDTH - RIGHT - 6}" cy="{TOP - 16}" r="5"/>'
        f'<text class="best-text" x="{WIDTH - RIGHT - 18}" y="{TOP - 12}" text-anchor="end">{escape(mark.text)}</text>'
    )


def _runs(points: Points) -> list[list[tuple[float, float]]]:
    """Stretches of finite values."""
    runs: list[list[tuple[float, float]]] = [[]]
    for p in points:
        if math.isfinite(p[1]):
            runs[-1].append(p)
        elif runs[-1]:
            runs.append([])
    return [r for r in runs if r]


def _thinned(run: Points) -> tuple[list[tuple[float, float]], ...]:
    """(least, mean, most) of about MOST_POINTS / 2 consecutive groups of a line."""
    size = math.ceil(len(run) / (MOST_POINTS // 2))
    low, mean, high = [], [], []
    for a in range(0, len(run), size):
        group = run[a : a + size]
        at, ys = math.fsum(p[0] for p in group) / len(group), [p[1] for p in group]
        low.append((at, min(ys)))
        mean.append((at, math.fsum(ys) / len(ys)))
        high.append((at, max(ys)))
    return low, mean, high


def _path(points: Points, x: Scale, y: Scale) -> str:
    return " ".join(f"{x.at(px):.1f},{y.at(py):.1f}" for px, py in points)
