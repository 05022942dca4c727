"""A run's page: well-formed, complete, readable, and the same for the same log."""

from __future__ import annotations

import json
import math
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cortiq_kernels.report import scale
from cortiq_kernels.report.history import History
from cortiq_kernels.report.page import MARK, page
from cortiq_kernels.report.runlog import LogError, read_log

EVIL = '<script src="http://x/y.js">alert(1)</script> & "quotes" ]]> \x1b'
START = {
    "event": "start", "time": 1.7e9, "version": "0.1.0", "recipe": "heal",
    "versions": {"torch": "2.13.0", "cuda": None},
    "settings": {"student": "a/b", "lr": 1e-3, "genesis": False, "dtype": None, "note": EVIL},
}  # fmt: skip
MODEL = {"path": "m", "layers": 3, "hidden": 24, "parameters": 12_345_678}
PLAN = {
    "event": "plan", "time": 1.7e9, "recipe": "heal", "student": MODEL, "teacher": MODEL, "loss": "KL", "steps": 8,
    "data": {"path": "d.jsonl", "records": {"train": 4, "val": 2}}, "device": "cpu", "device_reason": "asked for",
    "dtype": "f32", "dtype_reason": "the default", "memory": {"activations": 3 << 20}, "out": "healed", "notes": [],
}  # fmt: skip


def step(d: int, of: int, loss: float | None, norm: float = 1.0) -> dict:
    return {"event": "step", "time": 1.7e9 + d, "step": d, "of": of, "loss": loss, "loss_name": "KL", "norm": norm,
            "rate": 1e-4 * d, "seconds": 0.5, "tokens_per_s": 10.0, "left_s": 1.0, "skipped": 0}  # fmt: skip


def held(d: int, of: int, loss: float | None) -> dict:
    return {"event": "eval", "time": 1.7e9 + d, "step": d, "of": of, "loss": loss, "loss_name": "KL", "best": loss,
            "best_step": d, "improved": True}  # fmt: skip


def skip(d: int, skipped: int) -> dict:
    return {"event": "skip", "time": 1.7e9 + d, "step": d, "loss": None, "norm": None, "skipped": skipped,
            "in_row": 1, "scale": 1.0}  # fmt: skip


def a_run(of: int = 8) -> list[dict]:
    events = [START, PLAN | {"steps": of}, {"event": "note", "text": EVIL}, held(0, of, 2.0)]
    for d in range(1, of + 1):
        events.append(step(d, of, 2.0 / d, 10.0 ** (d % 3)))
        if d == 3:
            events.append(skip(4, 1))
        if d % 4 == 0:
            events.append(held(d, of, 1.0 + abs(d - of / 2) / of))
    return events


def parsed(events: list[dict]) -> ET.Element:
    return ET.fromstring(page(events))


def text_of(root: ET.Element) -> str:
    return " ".join(" ".join(root.itertext()).split())


def test_everything_is_on_it():
    done = {"event": "done", "time": 1.7e9 + 99, "seconds_per_step": 0.5, "tokens_per_second": 1234.0, "seconds": 99.0}
    root = parsed([*a_run(), done])
    text = text_of(root)
    for words in ("cortiq heal", "done", "Training KL", "Held-out KL", "Learning rate", "|g|", "best: 1.0000 at step 4",
                  "1 skipped", "1,234", "genesis no", "dtype not set", "torch 2.13.0", "12.35M parameters", "3.0 MiB",
                  "cpu (asked for)", "2023-11-14 22:13:20 UTC", "lr 0.001"):  # fmt: skip
        assert words in text, words
    assert len(root.findall(".//svg")) == 4


def test_it_needs_nothing_from_outside_and_runs_nothing():
    text = page(a_run())
    assert "\x1b" not in text and "<script" not in text and "&lt;script" in text
    root = ET.fromstring(text)
    for e in root.iter():
        assert e.tag not in ("script", "link", "img", "iframe", "object", "a"), e.tag
        assert not {"src", "href"} & set(e.attrib) and not [a for a in e.attrib if a.startswith("on")]
    style = root.find(".//style").text
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style
    used = set(re.findall(r"var\((--\w+)\)", style))
    for block in re.findall(r":root \{(.*?)\}", style, re.S):  # light, dark
        assert used <= set(re.findall(r"(--\w+):", block))


def test_contrast_of_text_on_paper():
    style = ET.fromstring(page(a_run())).find(".//style").text

    def luminance(color: str) -> float:
        color = color.lstrip("#")
        color = "".join(c * 2 for c in color) if len(color) == 3 else color
        parts = [int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for block in re.findall(r":root \{(.*?)\}", style, re.S):
        colors = dict(re.findall(r"--(\w+): (#\w+)", block))
        for name in ("ink", "soft", "best", "skip", "good"):
            a, b = sorted((luminance(colors[name]), luminance(colors["paper"])))
            assert (b + 0.05) / (a + 0.05) >= 4.5, name


def test_charts_speak_to_screen_readers():
    root = parsed(a_run())
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    for svg in root.findall(".//svg"):
        assert svg.get("role") == "img" and svg.find("title").text and svg.find("desc").text
        assert svg.get("aria-labelledby").split() == [svg.find("title").get("id"), svg.find("desc").get("id")]
    assert root.get("lang") == "en"


def boxes(svg: ET.Element) -> list[tuple[str, float, float, float, float]]:
    """(text, left, top, right, bottom) of every text, a character of 12 px taken as 7.2 wide."""
    found = []
    for t in svg.iter("text"):
        width = 7.2 * len(t.text or "")
        x, y = float(t.get("x")), float(t.get("y"))
        left = x - {"end": width, "middle": width / 2}.get(t.get("text-anchor"), 0.0)
        found.append((t.text or "", left, y - 9, left + width, y + 2))
    return found


@pytest.mark.parametrize("of", [1, 2, 7, 8, 99, 1000, 2600])
@pytest.mark.parametrize("size", [1e-9, 3e-4, 1.0, 123456.0, 4e9])
def test_labels_do_not_overlap_and_stay_inside(of, size):
    events = [e | {"loss": e["loss"] and e["loss"] * size} if "loss_name" in e else e for e in a_run(of)]
    for svg in parsed(events).findall(".//svg"):
        _, _, width, height = map(float, svg.get("viewBox").split())
        found = boxes(svg)
        for text, left, top, right, bottom in found:
            assert left >= 0 and right <= width and top >= 0 and bottom <= height, (text, left, right)
        for i, (a, al, at, ar, ab) in enumerate(found):
            for b, bl, bt, br, bb in found[:i]:
                assert ar <= bl or br <= al or ab <= bt or bb <= at, (a, b)
        numbers = [n for e in svg.iter() for k in ("points", "cx", "cy", "x", "y") for n in
                   re.findall(r"[^ ,]+", e.get(k, ""))]  # fmt: skip
        assert all(math.isfinite(float(n)) for n in numbers)


def test_the_line_is_where_its_values_are():
    """Read back from the picture: two ticks of each axis give the scale, the points give the values."""
    svg = next(s for s in parsed(a_run()).findall(".//svg") if s.find("title").text == "Held-out KL")
    ticks = [(float(t.text), float(t.get("x")), float(t.get("y")), t.get("text-anchor"))
             for t in svg.iter("text") if t.get("class") == "tick"]  # fmt: skip
    ys = [(v, y - 4) for v, _, y, anchor in ticks if anchor == "end"]
    xs = [(v, x) for v, x, _, anchor in ticks if anchor == "middle"]

    def back(pixel: float, axis: list[tuple[float, float]]) -> float:
        (a, pa), (b, pb) = axis[0], axis[-1]
        return a + (pixel - pa) / (pb - pa) * (b - a)

    points = [tuple(map(float, p.split(","))) for p in svg.find("polyline").get("points").split()]
    values = [(back(x, xs), back(y, ys)) for x, y in points]
    assert values == [pytest.approx(v, abs=0.01) for v in ((0, 2.0), (4, 1.0), (8, 1.5))]
    best = svg.find("circle[@class='best']")
    assert (float(best.get("cx")), float(best.get("cy"))) == points[1]


def test_a_value_that_is_not_finite_breaks_the_line():
    events = [START, PLAN, *(step(d, 8, None if d in (3, 4) else 1.0 / d) for d in range(1, 9)), held(0, 8, None)]
    root = parsed(events)
    training = next(s for s in root.findall(".//svg") if s.find("title").text == "Training KL")
    assert len(training.findall("polyline")) == 2
    assert "Held-out KL: nothing was measured." in text_of(root)


def test_a_long_run_stays_small():
    text = page(a_run(40_000))
    assert len(text) < 100_000 and text.count("<polygon") == 4
    svg = next(s for s in ET.fromstring(text).findall(".//svg") if s.find("title").text == "Training KL")
    assert len(svg.find("polyline").get("points").split()) <= 200


def test_the_same_log_gives_the_same_bytes(tmp_path):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text("".join(json.dumps(e) + "\n" for e in a_run()) + '{"event": "st')
    shutil.copy(a, b)
    assert page(read_log(a)) == page(read_log(b)) == page(a_run())
    assert page(a_run()).startswith(MARK)


def test_states():
    assert "still running, or stopped" in text_of(parsed(a_run()))
    failed = parsed([*a_run(), {"event": "error", "text": "TrainingFailed: got 20 steps"}])
    assert "ended early: TrainingFailed: got 20 steps" in text_of(failed)
    assert "cortiq run" in text_of(parsed([{"event": "other"}]))


def test_a_resumed_run_counts_each_step_once():
    again = [*a_run()[:-3], {"event": "error", "text": "Stopped"}, START, PLAN, skip(4, 1), step(4, 8, 9.0),
             step(5, 8, 8.0)]  # fmt: skip
    h = History.of_events(again)
    assert [d for d, _ in h.losses] == [1, 2, 3, 4, 5, 6] and dict(h.losses)[4] == 9.0
    assert len(h.skips) == 1 and h.state == "open" and "started 2 times" in h.state_text


def test_pages_of_fold_and_score():
    fold = [START | {"recipe": "fold"}, *({"event": "layer", "layer": i, "kept_energy": 0.5 + i / 300}
                                          for i in range(64))]  # fmt: skip
    root = parsed(fold)
    assert "least 50.0%, in layer 0" in text_of(root) and len(root.findall(".//rect")) == 64
    found = boxes(root.find(".//svg"))
    assert all(a[3] <= b[1] for a, b in zip(found[-5:], found[-4:], strict=False))
    row = {"event": "score", "model": "a", "split": "test", "category": None, "nll": 1.5, "perplexity": 4.48169,
           "count": 1000, "records": 7, "agreement": None, "kl": None}  # fmt: skip
    text = text_of(parsed([START | {"recipe": "score"}, row, row | {"model": "b", "agreement": 0.5, "kl": 0.25}]))
    assert "a test all 1.5000 4.482 1,000 7" in text and "50.0% 0.2500" in text


JUNK = st.one_of(st.none(), st.booleans(), st.integers(-9, 10**30), st.floats(), st.text(max_size=5), st.just([]),
                 st.just({}))  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_an_edited_log_gives_a_page_or_one_error(data):
    """Fields gone or replaced by anything: a well-formed page, or LogError; never another exception."""
    done = {"event": "done", "time": 1.7e9, "seconds_per_step": 0.5, "tokens_per_second": 1.0, "seconds": 9.0}
    events = [*a_run(), done]
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(events) - 1))
        key = data.draw(st.sampled_from(sorted(events[i])))
        changed = {k: v for k, v in events[i].items() if k != key}
        events[i] = changed if data.draw(st.booleans()) else changed | {key: data.draw(JUNK)}
    try:
        text = page(events)
    except LogError as e:
        assert "\n" not in str(e).strip()
    else:
        ET.fromstring(text)


def test_no_log():
    with pytest.raises(LogError, match="cannot be read"):
        read_log("/nowhere.jsonl")


@pytest.mark.parametrize("content", ["", "\n", "hello\n", "[1]\n", '{"x": 1}\n', '{"event": "x"}\nnot json\n'])
def test_other_files_are_no_logs(tmp_path: Path, content: str):
    file = tmp_path / "x.jsonl"
    file.write_text(content)
    with pytest.raises(LogError, match="expected a run log"):
        read_log(file)


@pytest.mark.parametrize("lo", [0.0, -3.0, 1e-12, 5.5, 1e8])
@pytest.mark.parametrize("span", [0.0, 1e-9, 0.3, 7.0, 12345.0])
def test_ticks_are_round_distinct_and_cover(lo, span):
    s = scale.linear([lo, lo + span], 100.0, 0.0)
    slack = 1e-12 * abs(lo + span)
    assert s.ticks[0] <= lo + slack and lo + span <= s.ticks[-1] + slack and 3 <= len(s.ticks) <= 8
    assert len(set(s.labels)) == len(s.labels) and s.at(s.ticks[0]) == 100.0 and s.at(s.ticks[-1]) == 0.0


def test_logarithmic_ticks():
    s = scale.logarithmic([0.003, 40.0], 100.0, 0.0)
    assert s.lo <= 0.003 and s.hi >= 40.0 and 2 <= len(s.ticks) <= 7
    assert s.at(s.hi) == 0.0 and s.at(math.sqrt(s.lo * s.hi)) == pytest.approx(50.0)
