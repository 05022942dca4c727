"""The benchmarks' gate: every entry is green on a CPU, and a wrong op gets no figure."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench import run, step, step_memory, verify  # noqa: E402
from bench.registry import Op, entries  # noqa: E402
from bench.report import results_path  # noqa: E402
from bench.timing import measure  # noqa: E402

CPU = torch.device("cpu")
OPS = entries()


def files_of_ops() -> set[str]:
    return {f.stem for f in (ROOT / "bench" / "ops").glob("*.py")} - {"__init__"}


def test_every_file_is_an_entry_of_its_own_name():
    assert set(OPS) == files_of_ops()
    assert all("small" in op.shapes for op in OPS.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", sorted(files_of_ops()))
def test_gates_are_green_on_the_cpu(name: str, dtype: torch.dtype):
    verdict = verify.gate(OPS[name], OPS[name].shapes["small"], dtype, CPU)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("name", sorted(files_of_ops()))
def test_work_is_stated_for_every_call(name: str):
    op = OPS[name]
    inputs = op.inputs(op.shapes["small"] | op.gate, torch.float32, CPU, torch.Generator().manual_seed(0))
    calls = op.calls(inputs, op.shapes["small"] | op.gate)
    work = op.work(op.shapes["small"], torch.float32)
    assert set(calls) == set(work)
    assert all(w.nbytes > 0 for w in work.values())


def spoiled(name: str, part: str, result: str, how) -> Op:
    """The entry with one result of one call changed by `how`."""

    def calls(inputs, sizes):
        made = OPS[name].calls(inputs, sizes)
        right = made[part]

        def wrong():
            out = dict(right())
            out[result] = how(out[result].clone())
            return out

        return {**made, part: wrong}

    return dataclasses.replace(OPS[name], calls=calls)


def nan_corner(t):
    t.view(-1)[-1] = float("nan")
    return t


def off_corner(t):
    t.view(-1)[-1] += 0.3 * t.abs().max()
    return t


WRONG = {
    "scaled gradient": spoiled("rms_norm", "bwd", "dx", lambda t: t * 1.01),
    "one NaN": spoiled("swiglu", "fwd", "act", nan_corner),
    "one wrong element": spoiled("linear", "bwd_w", "dw", off_corner),
    "two ids swapped": spoiled("topk_softmax", "top-k+lse", "ids", lambda t: t.roll(1, dims=1)),
    "another shape": spoiled("embedding", "fwd", "y", lambda t: t[:-1]),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_wrong_op_gets_no_figure(what: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    op, out = WRONG[what], tmp_path / "r.json"
    argv = [op.name, "--device", "cpu", "--dtype", dtype, "--shapes", "small", "--json", str(out)]
    assert run.main(argv, {op.name: op}) == 1
    printed = capsys.readouterr().out
    assert "gate RED" in printed and " ms" not in printed.split("gate RED")[1] and "host clock" not in printed
    written = json.loads(out.read_text())
    assert "rows" not in written and written["red"][0]["op"] == op.name


def test_an_op_that_raises_is_red(capsys: pytest.CaptureFixture[str]):
    def calls(inputs, sizes):
        raise RuntimeError("not today")

    op = dataclasses.replace(OPS["rms_norm"], calls=calls)
    assert run.main(["rms_norm", "--device", "cpu"], {"rms_norm": op}) == 1
    assert "RuntimeError: not today" in capsys.readouterr().out


def test_nan_in_the_truth_never_passes():
    op = dataclasses.replace(OPS["rms_norm"], reference=lambda t, s: {"y": t["x"] * t["weight"] * float("nan")})
    assert not verify.gate(op, op.shapes["small"], torch.float32, CPU).ok


def test_a_green_op_is_measured_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr("bench.timing.REPEATS", (2, 2))
    out = tmp_path / "deep" / "r.json"

    def absent(inputs, sizes):
        raise ModuleNotFoundError("No module named 'somebody_else'")

    op = dataclasses.replace(OPS["rms_norm"], eager=False, peers={"somebody else": absent})
    assert run.main(["rms_norm", "--device", "cpu", "--peers", "--json", str(out)], {"rms_norm": op}) == 0
    assert "No module named 'somebody_else'" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert {"device", "commit", "date", "versions"} <= set(written["environment"])
    assert written["floor"]["copy_gbs"] > 0
    ours = [r for r in written["rows"] if r["who"] == "cortiq_kernels"]
    assert [r["part"] for r in ours] == ["fwd", "bwd", "bwd+n", "fwd+bwd"]
    for r in ours:
        assert 0 < r["p20_ms"] <= r["median_ms"] <= r["p80_ms"] and r["floor_percent"] > 0
        assert r["sizes"]["h"] == 64 and r["dtype"] == "float32"
    assert [r for r in written["rows"] if r["who"] == "somebody else"][0]["failed"]
    assert not list(out.parent.glob("*.partial"))


def test_measure_takes_inputs_in_turn():
    seen = []
    timing = measure([lambda: seen.append(0), lambda: seen.append(1)], CPU)
    assert seen.count(0) >= 2 and abs(seen.count(0) - seen.count(1)) <= 1
    assert timing.p20 <= timing.median <= timing.p80


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as e:
        run.main(["rms_nrom"])
    assert e.value.code == 2 and "rms_nrom" in capsys.readouterr().err


def test_results_have_a_place_by_device():
    assert results_path(CPU, "ops.json") == ROOT / "bench" / "results" / "cpu" / "ops.json"


SMALL_STEP = ["--size", "small", "--device", "cpu", "--batch", "1", "--window", "32", "--topk", "4", "--steps", "2"]


def test_step_loss_falls_and_is_recorded(tmp_path: Path):
    out = tmp_path / "s.json"
    assert step.main([*SMALL_STEP, "--rate", "1e-3", "--json", str(out)]) == 0
    found = json.loads(out.read_text())["step"]
    losses = found["eager"]["loss_by_step"]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert found["gemm_floor_ms"] > 0 and found["eager"]["of_floor"] > 1 and "graph" not in found


def test_step_that_does_not_learn_reports_no_time(capsys: pytest.CaptureFixture[str]):
    assert step.main([*SMALL_STEP, "--rate", "0"]) == 1
    printed = capsys.readouterr().out
    assert "the loss did not fall" in printed and "tokens/s" not in printed


@pytest.mark.parametrize(
    ("losses", "accepted", "skipped"), [([2.0, float("nan")], 2, 0), ([2.0, 1.0], 1, 1), ([2.0, 2.0], 2, 0)]
)
def test_step_gate(losses: list[float], accepted: int, skipped: int):
    assert step.red(losses, accepted, skipped)
    assert not step.red([2.0, 1.5], 2, 0)


SMALL_STEPS = ["--size", "small", "--batch", "2", "--window", "32", "--topk", "4", "--steps", "1", "--device", "cpu"]


@pytest.mark.parametrize("more", [[], ["--train", "mlp", "--train-from", "2"]])
def test_policies_of_a_step_are_told_apart_by_memory_alone(tmp_path, capsys, more):
    where = tmp_path / "p.json"
    assert step_memory.main([*SMALL_STEPS, *more, "--json", str(where)]) == 0
    rows = json.loads(where.read_text())["policies"]
    assert [r["policy"] for r in rows] == ["keep", "cheap", "layer"] and all(r["median_ms"] > 0 for r in rows)
    assert rows[0]["buffers"] > rows[1]["buffers"] > rows[2]["buffers"] > 0
    assert "peak predicted" in capsys.readouterr().out


def test_policies_with_other_losses_get_no_file(tmp_path, monkeypatch, capsys):
    made = step_memory.measure
    monkeypatch.setattr(
        step_memory, "measure", lambda args, policy, *a: (made(args, policy, *a)[0], [1.0 if policy == "keep" else 2.0])
    )
    assert step_memory.main([*SMALL_STEPS, "--json", str(tmp_path / "p.json")]) == 1
    assert not (tmp_path / "p.json").exists() and "the losses differ between policies" in capsys.readouterr().out
