"""Plans and results as text for people: what was decided; what changed, where it is, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from cortiq_kernels.report.console import clean, number, seconds


def size(n: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n} B"


def speed(tokens_per_s: float) -> str:
    """Tokens a second for people, to three digits: more is noise."""
    return f"{float(f'{tokens_per_s:.3g}'):,.0f}"


def count(n: int) -> str:
    """A large number for people."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= scale:
            return f"{n / scale:.2f}{unit}"
    return str(n)


def plan_text(plan: dict[str, Any]) -> str:
    """A dry run's result: one line a decision."""
    lines = [f"{plan['recipe']}: a dry run; nothing was written"]
    models = {k: plan[k] for k in ("student", "teacher", "model") if plan.get(k)} | plan.get("models", {})
    lines += [f"  {name:16}{model_text(m)}" for name, m in models.items()]
    data = plan["data"]
    splits = data.get("records", {})
    facts = [f"{splits[k]} {'records' if k == 'records' else k}" for k in ("records", "train", "val") if k in splits]
    facts += [f"{v} {k.replace('_', ' ')}" for k, v in data.items() if isinstance(v, int)]
    facts += [f"{v} {k} scored tokens" for k, v in data.get("scored_tokens", {}).items()]
    lines.append(f"  {'data':16}{data['path']}: {', '.join(facts)}")
    if "steps" in plan:
        lines.append(
            f"  {'steps':16}{plan['steps']} of {plan['tokens_per_step']} tokens ({plan['steps_per_epoch']} a pass), "
            f"{plan['loss']} loss, "
            + (f"{count(plan['gates'])} gates" if "gates" in plan else f"{count(plan['trained_parameters'])} weights")
            + " train"
        )
        if "target" in plan:
            lines.append(f"  {'target':16}{plan['target']:.1%} of the gates closed; evaluations {plan['evaluations']}")
        said = ("phases", "prefix", "targets", "activations", "checkpoint")
        lines += [f"  {k:16}{plan[k]}" for k in said if k in plan]
    if "width" in plan:
        lines.append(f"  {'width':16}{plan['width']}: {count(plan['parameters_after'])} parameters remain")
    lines += [f"  {k:16}{plan[k]}" for k in ("passes", "file") if k in plan]
    lines.append(f"  {'device':16}{plan['device']}: {plan['device_reason']}")
    lines.append(f"  {'precision':16}{plan['dtype']}: {plan['dtype_reason']}")
    lines += [f"  {'memory':16}{text}" for text in memory_text(plan["memory"])]
    if "backends" in plan:
        lines += [f"  {'backend':16}{text}" for text in backend_text(plan["backends"])]
    lines += [f"  {'note':16}{note}" for note in plan["notes"]]
    return clean("\n".join(lines))


def memory_text(memory: dict[str, int]) -> list[str]:
    """What the parts take, then what that comes to and what there is."""
    totals = ("least", "peak", "free", "host_least", "host_free")
    words = {"least": "at least", "peak": "at the peak", "host_least": "on the host at least"}

    def text(k: str) -> str:
        return f"{words.get(k, k.replace('_', ' '))} {size(memory[k])}"

    parts = [text(k) for k, v in memory.items() if k not in totals and v]
    return [", ".join(part) for part in (parts, [text(k) for k in totals if k in memory]) if part]


def backend_text(backends: dict[str, dict[str, str]]) -> list[str]:
    """A line for each backend and reason: `triton: head_topk_kl, topk_softmax (Triton kernels)`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for op, b in backends.items():
        groups.setdefault((b["backend"], b["reason"]), []).append(op)
    return [f"{kind}: {', '.join(ops)} ({why})" for (kind, why), ops in groups.items()]


def model_text(m: dict[str, Any]) -> str:
    """A geometry in words."""
    return (
        f"{m['path']}: {m['layers']} layers ({m['full_attention_layers']} full attention), hidden {m['hidden']}, "
        f"ffn {m['ffn']}, vocabulary {m['vocab']}, {count(m['parameters'])} parameters"
    )


def result_text(name: str, cfg: Any, report: dict[str, Any], files: Sequence[str]) -> str:
    """The end of a run; `files`: its log and page, where there are any."""
    lines = [f"note: {note}" for note in report["notes"]] if name in ("bake", "capture", "fold") else []
    made = {
        "capture": capture_lines, "heal": heal_lines, "score": score_lines, "fold": fold_lines, "masks": masks_lines,
        "bake": bake_lines,
    }  # fmt: skip
    lines += made[name](cfg, report)
    if files:
        lines.insert(-1, f"run log: {', page: '.join(files)}")
    return clean("\n".join(lines))


def heal_lines(cfg: Any, r: dict[str, Any]) -> list[str]:
    """What healing changed."""
    loss, last = r["loss_name"], f"step {r['best_step']} of {r['steps']}"
    if r["best_step"] == 0:
        head = f"not healed: no step of {r['steps']} improved the held-out {loss} {number(r['loss_start'])}; "
        head += "the weights are the student's own"
    else:
        head = f"healed: held-out {loss} {number(r['loss_start'])} -> {number(r['loss_best'])} (best at {last}, "
        head += f"{count(r['trained_parameters'])} weights trained)"
    models = [str(p) for p in (cfg.teacher, cfg.student) if p] + [r["out"]]
    score = f"next: {command('score', '--models', *models, '--data', str(cfg.data))}"
    if r.get("already_done"):
        return [f"already done: {head}", f"{r['out']} is as it was; {score}"]
    speed = f"{r['seconds_per_step']:.2f} s/step, {r['tokens_per_second']:,.0f} tokens/s, "
    speed += f"teacher {seconds(r['teacher_seconds'])}, {seconds(r['seconds'])} in all"
    speed += f", {r['skipped']} steps skipped" if r["skipped"] else ""
    return [head, speed, f"wrote {r['out']}; {score}"]


def capture_lines(cfg: Any, r: dict[str, Any]) -> list[str]:
    """What was captured."""
    passes = "one pass" if r["passes"] == 1 else f"{r['passes']} passes"
    dead = f"{sum(r['dead'])} neurons were never active" if any(r["dead"]) else "every neuron was active"
    head = f"captured: {len(r['layers'])} layers on {r['rows']:,} tokens in {passes}, {size(r['nbytes'])}; {dead}"
    pace = f"{r['tokens_per_s']:,.0f} tokens/s, {seconds(r['seconds'])} in all"
    args = ("--model", str(cfg.model), "--grams", r["out"], "--out", str(cfg.model).rstrip("/") + "-fold")
    return [head, pace, f"wrote {r['out']}; next: {command('fold', *args)}"]


def masks_lines(cfg: Any, r: dict[str, Any]) -> list[str]:
    """What the gates came to."""
    loss = r["loss_name"]
    head = f"masks: {r['pruned']:.1%} of {count(r['gates'])} neurons closed (target {r['target']:.1%}"
    head += ")" if r["reached"] else ", not reached)"
    head += f"; held-out {loss} {number(r['loss_open'])} with all open, {number(r['loss_best'])} masked"
    head += f", which is {'worse' if r['loss_best'] > r['loss_open'] else 'no worse'}"
    head += f" (best at step {r['best_step']} of {r['steps']})"
    folded = r["out"].removesuffix(".safetensors") + "-fold"
    args = ("--model", str(cfg.model), "--data", str(cfg.data), "--masks", r["out"], "--out", folded)
    follows = f"next: {command('fold', *args)}"
    if r.get("already_done"):
        return [f"already done: {head}", f"{r['out']} is as it was; {follows}"]
    speed = f"{r['seconds_per_step']:.2f} s/step, {r['tokens_per_second']:,.0f} tokens/s, "
    speed += f"teacher {seconds(r['teacher_seconds'])}, " if r["teacher_seconds"] else ""
    speed += f"{seconds(r['seconds'])} in all" + (f", {r['skipped']} steps skipped" if r["skipped"] else "")
    return [head, speed, f"wrote {r['out']}; {follows}"]


def bake_lines(cfg: Any, r: dict[str, Any]) -> list[str]:
    """What baking came to."""
    head = f"baked: {r['pruned']:.1%} of the neurons closed"
    head += f" (target {r['target']:.1%}{'' if r['reached'] else ', not reached'})" if r["target"] else ""
    head += f"; held-out perplexity {number(r['backbone'], 3)} of the backbone, {number(r['masked'], 3)} masked, "
    head += f"{number(r['overlaid'], 3)} overlaid"
    trained = r["trained_layers"]
    tuned = f"layers {trained[0]} to {trained[-1]} tuned" if trained else "no weight changed"
    sizes = f"{count(r['parameters_before'])} -> {count(r['parameters_after'])} parameters"
    made = f"MLP width {r['width_before']} -> {kept_text(r['kept'])}, {sizes}; {tuned}"
    score = f"next: {command('score', '--models', str(cfg.model), r['out'], '--data', str(cfg.data))}"
    if r.get("already_done"):
        return [f"already done: {head}", made, f"{r['out']} is as it was; {score}"]
    pace = f"{r['seconds_per_step_a']:.2f} s/step in phase A, "
    pace += f"{r['seconds_per_step_b']:.2f} in phase B, " if r["steps_b"] else ""
    pace += f"{seconds(r['seconds'])} in all" + (f", {r['skipped']} steps skipped" if r["skipped"] else "")
    return [head, made, pace, f"wrote {r['out']} and {r['masks']}; {score}"]


def kept_text(kept: Sequence[int]) -> str:
    """Widths of layers in words."""
    return str(kept[0]) if min(kept) == max(kept) else f"{min(kept)} to {max(kept)} (per layer)"


def widths_text(r: dict[str, Any]) -> str:
    """The widths of a fold's result."""
    return kept_text(r.get("widths", [r["width"]]))


def fold_lines(cfg: Any, r: dict[str, Any]) -> list[str]:
    """What folding changed."""
    before, low = sorted(set(r["width_before"])), min(r["kept_energy"])
    mean = sum(r["kept_energy"]) / len(r["kept_energy"])
    was = str(before[0]) if len(before) == 1 else f"{before[0]} to {before[-1]}"
    sizes = f"{count(r['parameters_before'])} -> {count(r['parameters_after'])} parameters"
    head = f"folded: MLP width {was} -> {widths_text(r)}, {sizes}; kept energy {mean:.1%} on average, "
    head += f"{low:.1%} in layer {r['kept_energy'].index(low)} (the least)"
    lines = [head]
    if r["repaired"]:
        left = r["output_residual"]
        most = f"{max(left):.1%} in layer {left.index(max(left))} (the most)"
        mean = sum(left) / len(left)
        lines.append(f"repaired: {mean:.1%} of the error of an MLP's output is left on average, {most}")
    healed, data = r["out"].rstrip("/") + "-healed", str(cfg.data or "RECORDS.jsonl")
    args = ("--student", r["out"], "--teacher", str(cfg.model), "--data", data, "--out", healed)
    return [*lines, f"wrote {r['out']}; next: {command('heal', *args)}"]


def score_lines(cfg: Any, r: dict[str, Any]) -> list[str]:
    """The table of a score."""
    columns = ("NLL", "perplexity", "tokens", "records", "top-1 agreement", "KL to source", "tokens/s")
    rows = [("model", "split", "category", *columns)]
    for s in r["rows"]:
        same = "" if s["agreement"] is None else f"{s['agreement']:.1%}"
        kl = "" if s["kl"] is None else number(s["kl"])
        where = (s["model"], s["split"], s["category"] or "all")
        facts = (number(s["nll"]), number(s["perplexity"], 3), str(s["count"]), str(s["records"]))
        rows.append((*where, *facts, same, kl, speed(r["tokens_per_s"][s["model"]]) if not s["category"] else ""))
    shown = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = [
        "  ".join(row[i].ljust(wide[i]) if i < 3 else row[i].rjust(wide[i]) for i in shown).rstrip() for row in rows
    ]
    saved = f", {cfg.out} written" if cfg.out else ""
    tokens = {s["split"]: s["count"] for s in r["rows"] if s["category"] is None}
    measured = ", ".join(f"{n} {split} tokens" for split, n in tokens.items())
    return [*text, f"scored {len(r['models'])} model(s) on {measured} in {r['dtype']} on {r['device']}{saved}"]


def command(recipe: str, *args: str) -> str:
    """A command line to type."""
    return f"cortiq {recipe} {shlex.join(args)}"
