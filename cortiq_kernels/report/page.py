"""A run's page: its log as one HTML file that needs nothing else, and no network.

Charts (inline SVG), what came out, every setting, the environment, the data and all notes. Light and dark follow the
reader's system. The page is a function of the log alone: the same log gives the same bytes. It is well-formed XML, and
every text of the log is escaped.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from cortiq_kernels.report.chart import Mark, bar_chart, line_chart
from cortiq_kernels.report.console import clean, number, seconds
from cortiq_kernels.report.history import History
from cortiq_kernels.report.results import count, kept_text, size, widths_text
from cortiq_kernels.report.runlog import LogError
from cortiq_kernels.report.style import STYLE

MARK = "<!DOCTYPE html><!-- cortiq run page -->"

MOST_ROWS = 200
Row = Sequence[object]


def page(events: Sequence[Mapping[str, Any]]) -> str:
    """The page of a run's events (`runlog.read_log`), of any recipe, ended or not.

    LogError when an event lacks what its kind holds: a log that somebody edited, or of another version.
    """
    try:
        return _page(History.of_events(events))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as e:
        got = f"an event that is not as this version writes it ({type(e).__name__}: {e})"
        raise LogError(f"run log: got {got}; expected an unchanged log. Take the original.") from e


def _page(h: History) -> str:
    title = f"cortiq {h.recipe}"
    out = h.plan.get("out") or h.settings.get("out")
    body = [
        f"<header><h1>{escape(title)}</h1>",
        f"<p class='state {h.state}'>{escape(h.state_text)}</p>",
        f"<p class='where'>{escape(str(out))}</p>" if out else "",
        "</header>",
        _facts(_headline(h)),
        *{"heal": _heal, "fold": _fold, "score": _score, "capture": _capture, "masks": _masks, "bake": _bake}.get(
            h.recipe, lambda h: []
        )(h),
        _notes(h.notes),
        _section("Inputs", _table(("", ""), _inputs(h.plan))) if h.plan else "",
        _section("Memory, as planned", _table(("part", "size"), [(_words(k), size(v)) for k, v in _memory(h.plan)])),
        _section("Settings", _table(("setting", "value"), [(k, _text(v)) for k, v in h.settings.items()])),
        _section("Environment", _table(("", ""), _environment(h))),
    ]
    head = (
        '<head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        f'<meta name="color-scheme" content="light dark"/><title>{escape(title)}</title><style>{STYLE}</style></head>'
    )
    parts = "\n".join(p for p in body if p)
    return clean(f'{MARK}\n<html lang="en">\n{head}\n<body><main>\n{parts}\n</main></body></html>\n')


def _headline(h: History) -> list[Row]:
    """The few figures that a reader looks for first."""
    r = h.result
    if h.recipe == "heal":
        name = h.loss_name
        first, best = h.evaluations[:1], h.best
        return [
            (f"held-out {name} before", number(first[0][1]) if first else "not measured"),
            (f"best held-out {name}", f"{number(best[1])} after step {best[0]}" if best else "not measured"),
            ("steps", f"{h.last_step} of {h.of}" + (f", {len(h.skips)} skipped" if h.skips else "")),
            ("seconds a step", number(r["seconds_per_step"], 3) if r else _mean(h.seconds)),
            ("tokens/s", f"{r['tokens_per_second']:,.0f}" if r else ""),
            ("in all", seconds(r["seconds"]) if r else ""),
        ]
    if h.recipe == "masks":
        name, best = h.loss_name, h.best
        closed = f"{h.pruned[best[0]]:.1%}" if best else "not measured"
        return [
            (f"held-out {name}, all open", number(h.evaluations[0][1]) if h.evaluations else "not measured"),
            (f"held-out {name}, masked", f"{number(best[1])} after step {best[0]}" if best else "not measured"),
            ("closed", closed + (f" (target {h.plan['target']:.1%})" if "target" in h.plan else "")),
            ("steps", f"{h.last_step:,}" + (f", {len(h.skips)} skipped" if h.skips else "")),
            ("seconds a step", number(r["seconds_per_step"], 3) if r else _mean(h.seconds)),
            ("in all", seconds(r["seconds"]) if r else ""),
        ]
    if h.recipe == "bake":
        ended: list[Row] = [("held-out perplexity, backbone", perplexity(h.evaluations[0][1]))] if h.evaluations else []
        if r:
            ended += [(k, number(r[k], 3)) for k in ("masked", "overlaid")]
            ended += [("closed", f"{r['pruned']:.1%}"), ("MLP width", f"{r['width_before']} to {kept_text(r['kept'])}")]
        return [
            *ended,
            ("steps", f"{h.last_step} of {h.of}" + (f", {len(h.skips)} skipped" if h.skips else "")),
            ("in all", seconds(r["seconds"]) if r else ""),
        ]
    if h.recipe == "fold" and r:
        mean = sum(r["kept_energy"]) / len(r["kept_energy"])
        left = r.get("output_residual")
        return [
            ("width", f"{max(r['width_before'])} to {widths_text(r)}"),
            ("parameters", f"{count(r['parameters_before'])} to {count(r['parameters_after'])}"),
            ("kept energy", f"{mean:.1%} on average"),
            ("output error left", f"{sum(left) / len(left):.1%} on average" if left else "not repaired"),
            ("in all", seconds(r["seconds"])),
        ]
    if h.recipe == "capture" and r:
        return [
            ("layers", str(len(r["layers"]))),
            ("tokens", f"{r['rows']:,}"),
            ("passes", str(r["passes"])),
            ("file", size(r["nbytes"])),
            ("tokens/s", f"{r['tokens_per_s']:,.0f}"),
            ("in all", seconds(r["seconds"])),
        ]
    return []


def _capture(h: History) -> list[str]:
    """Mean squares span decades, which bars from zero would hide: a table."""
    rows = [(e["layer"], f"{float(e['energy']):.4g}", e["dead"]) for e in h.layers]
    head = ("layer", "mean square of an activation", "neurons never active")
    return [_section("Activations by layer", _table(head, rows))]


def _heal(h: History) -> list[str]:
    name, best = h.loss_name, h.best
    skipped = f"{len(h.skips)} skipped steps, marked at the bottom" if h.skips else ""
    losses = [y for _, y in h.losses if math.isfinite(y)]
    about = f"{name} of the batches of each step, {_span(losses)}."
    charts = [
        line_chart("loss", f"Training {name}", about, h.losses, last=h.of, unit=f"{name} (nat a token)"),
        line_chart(
            "held", f"Held-out {name}", f"{name} on the val records: {_evaluated(h)}.", h.evaluations, last=h.of,
            unit=f"{name} (nat a token)", dots=True,
            mark=Mark(*best, f"best: {number(best[1])} at step {best[0]}") if best else None,
        ),
        line_chart("rate", "Learning rate", f"The rate of each step, {_span([y for _, y in h.rates])}.", h.rates,
                   last=h.of, unit="rate", log=False),
        line_chart(
            "norm", "Gradient norm |g|", f"The global norm before clipping, {_span([y for _, y in h.norms])}; "
            + (f"{skipped}." if skipped else "no step was skipped."), h.norms, last=h.of, unit="|g|",
            ticks_at=[s["step"] for s in h.skips], ticks_text=skipped,
        ),
    ]  # fmt: skip
    held = [(f"{d:,}", number(y)) for d, y in h.evaluations]
    out = [*charts, _details(f"Held-out {name} as a table", ("after step", f"held-out {name}"), held)]
    skips = [(s["step"], number(s["loss"]), number(s["norm"], 3), s.get("scale", "")) for s in h.skips]
    return [*out, _details(f"Skipped steps ({len(skips)})", ("at step", "loss", "|g|", "loss scale"), skips)]


def _masks(h: History) -> list[str]:
    name, best, last = h.loss_name, h.best, h.last_step
    closed = [(d, y) for d, y in h.pruned.items()]
    charts = [
        line_chart("closed", "Closed gates", f"Share of all gates, {_span([y for _, y in closed])}.", closed, last=last,
                   unit="share", log=False, dots=True),
        line_chart(
            "held", f"Held-out {name}, hard gates", f"{name} on the val records: {_evaluated(h)}.", h.evaluations,
            last=last, unit=f"{name} (nat a token)", dots=True,
            mark=Mark(*best, f"chosen: {number(best[1])} at step {best[0]}") if best else None,
        ),
        line_chart("loss", f"Training {name}, soft gates", f"{name} of the batch of each step.", h.losses, last=last,
                   unit=f"{name} (nat a token)"),
    ]  # fmt: skip
    rows = [(f"{d:,}", f"{h.pressure[d]:.4g}", f"{y:.2%}", number(h.held[d])) for d, y in closed]
    charts.append(_details("Evaluations as a table", ("after step", "pressure l1", "closed", f"held-out {name}"), rows))
    return [*charts, *_kept(h, "kept", "Open gates by layer")]


def _kept(h: History, key: str, title: str) -> list[str]:
    """Bars of what each layer keeps, and how much it gave up."""
    kept, widths = h.result.get(key, []), h.plan["model"]["ffn"] if h.result.get(key) else 0
    have = [widths if isinstance(widths, int) else widths[i % len(widths)] for i in range(len(kept))]
    lost = sorted(((f - k, i) for i, (k, f) in enumerate(zip(kept, have, strict=True))), key=lambda x: (-x[0], x[1]))
    if not kept:
        return []
    most = [f"layer {i} {n:,}" for n, i in lost[:3] if n]
    about = f"Neurons that stay, of {max(have):,}. "
    about += f"Given up most: {', '.join(most)}." if most else "No layer gave up any."
    bars = [(str(i), float(k)) for i, k in enumerate(kept)]
    rows = [(i, f"{k:,}", f"{f - k:,}", f"{1 - k / f:.1%}") for i, (k, f) in enumerate(zip(kept, have, strict=True))]
    return [
        bar_chart("kept", title, about, bars, "neurons"),
        _details(f"{title}, as a table", ("layer", "stay", "given up", "share given up"), rows),
    ]


def _bake(h: History) -> list[str]:
    """Both phases on one axis of steps: in phase B the mask stays as it is."""
    best, last = h.best, h.of or h.last_step
    held = [(d, perplexity_of(y)) for d, y in h.evaluations]
    first, began = h.settings.get("steps_a", last), [y for _, y in h.pruned.items()]
    charts = [
        line_chart("closed", "Closed neurons", f"Share of all, as exported, {_span(began)}.", list(h.pruned.items()),
                   last=last, unit="share", log=False, dots=True),
        line_chart(
            "held", "Held-out perplexity, hard gates",
            f"Phase A up to step {first}, then phase B with the chosen mask. NLL: {_evaluated(h)}.", held, last=last,
            unit="perplexity", dots=True,
            mark=Mark(best[0], perplexity_of(best[1]), f"chosen: {perplexity(best[1])} at step {best[0]}")
            if best else None,
        ),
        line_chart("loss", "Training NLL", "Of the chunk of each step: soft gates in phase A, hard ones in phase B.",
                   h.losses, last=last, unit="NLL (nat a token)"),
        line_chart("norm", "Gradient norm |g|", "Before clipping, of the gates, then of the weights.", h.norms,
                   last=last, unit="|g|", ticks_at=[s["step"] for s in h.skips],
                   ticks_text=f"{len(h.skips)} skipped steps, marked at the bottom" if h.skips else ""),
    ]  # fmt: skip
    rows = [(f"{d:,}", f"{h.pressure[d]:.4g}", f"{y:.2%}", perplexity(h.held[d])) for d, y in h.pruned.items()]
    head = ("after step", "pressure l1", "closed", "held-out perplexity")
    return [*charts, _details("Evaluations as a table", head, rows), *_kept(h, "kept", "Neurons by layer")]


def perplexity_of(loss: float) -> float:
    """exp of a mean loss; NaN where it has none."""
    return math.exp(loss) if loss < 700 else math.nan


def perplexity(loss: float) -> str:
    """The same for people."""
    return number(perplexity_of(loss), 3)


def _fold(h: History) -> list[str]:
    bars = [(str(e["layer"]), float(e["kept_energy"])) for e in h.layers]
    if not bars:
        return []
    low = min(bars, key=lambda b: b[1])
    about = f"Share of each layer's energy that its kept neurons hold; least {low[1]:.1%}, in layer {low[0]}."
    rows = [(label, f"{v:.2%}") for label, v in bars]
    chart = bar_chart("energy", "Kept energy by layer", about, bars, "share")
    out = [chart, _details("Kept energy as a table", ("layer", "kept energy"), rows)]
    left = [(str(e["layer"]), float(e["output_residual"]), float(e["residual"])) for e in h.layers if "residual" in e]
    if not left:
        return out
    most = max(left, key=lambda b: b[1])
    about = "Share of the error of each layer's output that is left after the repair of down_proj; "
    about += f"most {most[1]:.1%}, in layer {most[0]}."
    repaired = [(label, value) for label, value, _ in left]
    out.append(bar_chart("residual", "Error left by layer", about, repaired, "share"))
    rows3 = [(label, f"{o:.2%}", f"{a:.2%}") for label, o, a in left]
    return [*out, _details("Error left as a table", ("layer", "of the output", "of the activations"), rows3)]


def _score(h: History) -> list[str]:
    names = ("model", "split", "category", "NLL", "perplexity", "tokens", "records", "top-1 agreement", "KL to source")
    rows = [
        (
            s["model"], s["split"], s["category"] or "all", number(s["nll"]), number(s["perplexity"], 3),
            f"{s['count']:,}", f"{s['records']:,}", "" if s["agreement"] is None else f"{s['agreement']:.1%}",
            "" if s["kl"] is None else number(s["kl"]),
        )
        for s in h.scores
    ]  # fmt: skip
    out = [_section("Scores", _table(names, rows))] if rows else []
    speeds = h.result.get("tokens_per_s", {})
    if speeds:
        table = _table(("model", "tokens/s"), [(name, f"{v:,.0f}") for name, v in speeds.items()])
        out.append(_section("Speed of the forward pass", table))
    return out


def _evaluated(h: History) -> str:
    if not h.evaluations:
        return "not measured"
    first, last = h.evaluations[0], h.evaluations[-1]
    text = f"{number(first[1])} after step {first[0]}, {number(last[1])} after step {last[0]}"
    return text + (f", best {number(h.best[1])} after step {h.best[0]}" if h.best else "")


def _span(values: Sequence[float]) -> str:
    values = [v for v in values if math.isfinite(v)]
    return f"from {values[0]:.4g} to {values[-1]:.4g}, between {min(values):.4g} and {max(values):.4g}" if values else (
        "never measured"
    )  # fmt: skip


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else ""


def _inputs(plan: Mapping[str, Any]) -> list[Row]:
    models = {k: plan[k] for k in ("student", "teacher", "model") if plan.get(k)} | dict(plan.get("models", {}))
    rows: list[Row] = []
    for name, m in models.items():
        text = f"{m['path']} ({m['layers']} layers, hidden {m['hidden']}, {count(m['parameters'])} parameters)"
        rows.append((name, text))
    data = plan.get("data", {})
    rows += [(f"data: {_words(k)}", _text(v)) for k, v in data.items()]
    return rows + [(_words(k), _text(plan[k])) for k in _PLANNED if k in plan]


_PLANNED = (
    "loss", "topk", "trained_parameters", "steps", "steps_per_epoch", "tokens_per_step", "phases", "prefix", "width",
)  # fmt: skip


def _memory(plan: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [(k, v) for k, v in plan.get("memory", {}).items() if isinstance(v, int) and v]


def _environment(h: History) -> list[Row]:
    """Device, precision, versions and times."""
    rows: list[Row] = []
    for k in ("device", "dtype"):
        if k in h.plan:
            rows.append((k, f"{h.plan[k]} ({h.plan.get(k + '_reason', '')})"))
    rows += [(k, _text(v)) for k, v in h.versions.items()]
    if h.result.get("peak_device_bytes"):
        rows.append(("peak device memory", size(h.result["peak_device_bytes"])))
    rows += [(what, _utc(t)) for what, t in (("began", h.began), ("ended", h.ended)) if t is not None]
    return rows


def _utc(t: float) -> str:
    return datetime.datetime.fromtimestamp(t, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(n)}</li>" for n in notes)
    return f"<section><h2>Notes</h2><ul>{items}</ul></section>" if items else ""


def _facts(rows: Sequence[Row]) -> str:
    items = "".join(f"<div><dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd></div>" for k, v in rows if v != "")
    return f"<dl>{items}</dl>" if items else ""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _table(head: Sequence[str], rows: Sequence[Row]) -> str:
    """Rows whose first cell names them; no column heads when they are all empty."""
    if not rows:
        return ""
    names = "".join(f'<th scope="col">{escape(h)}</th>' for h in head)
    top = f"<thead><tr>{names}</tr></thead>" if any(head) else ""
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(str(c))}</td>" for c in rest)
        lines.append(f'<tr><th scope="row">{escape(str(first))}</th>{cells}</tr>')
    return f"<div class='scroll'><table>{top}<tbody>{''.join(lines)}</tbody></table></div>"


def _details(title: str, head: Sequence[str], rows: Sequence[Row]) -> str:
    """A table that is folded away; of a long one every k-th row and the last."""
    if not rows:
        return ""
    every = math.ceil(len(rows) / MOST_ROWS)
    if every > 1:
        title += f" (one in {every}, and the last; the log has all)"
        rows = [r for i, r in enumerate(rows) if i % every == 0 or i == len(rows) - 1]
    return f"<details><summary>{escape(title)}</summary>{_table(head, rows)}</details>"


def _words(key: str) -> str:
    return key.replace("_", " ")


def _text(value: object) -> str:
    """A setting or count for people."""
    if isinstance(value, Mapping):
        return ", ".join(f"{v} {_words(str(k))}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not set" if value is None else str(value)
