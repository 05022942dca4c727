"""Kernels compiled before they run: what is launched, what only compiled, and how often."""

from __future__ import annotations

import contextlib

import pytest

triton = pytest.importorskip("triton")

from cortiq_kernels.ops import jit  # noqa: E402


class Recorded:
    """Stands for a `triton.jit` function: notes whether it was launched or only compiled."""

    arg_names = ("x",)

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *args, **kw: self.calls.append(("run", grid, args, kw))

    def warmup(self, *args, grid, **kw):
        self.calls.append(("compile", grid, args, kw))


@pytest.fixture(autouse=True)
def _compiler(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton, "AsyncCompileMode", lambda pool, ignore_errors: contextlib.nullcontext())
    monkeypatch.setattr(jit, "_compiled", set())


def test_a_launch_runs_outside_and_compiles_inside():
    k = jit.Kernel(Recorded())
    jit.compile_ahead(lambda: k[(3,)](1, BLOCK=2))
    k[(4,)](5, BLOCK=6)
    assert k.calls == [("compile", (3,), (1,), {"BLOCK": 2}), ("run", (4,), (5,), {"BLOCK": 6})]
    assert k.arg_names == ("x",)


def test_launches_run_again_after_a_body_that_fails():
    k = jit.Kernel(Recorded())

    def fails():
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        jit.compile_ahead(fails)
    k[(1,)]()
    assert k.calls == [("run", (1,), (), {})]


def test_an_inner_call_belongs_to_the_outer_one():
    k = jit.Kernel(Recorded())

    def outer():
        jit.compile_ahead(lambda: k[(1,)]())
        k[(2,)]()

    jit.compile_ahead(outer)
    assert [c[:2] for c in k.calls] == [("compile", (1,)), ("compile", (2,))]


def test_once_a_key_and_never_in_the_interpreter(monkeypatch):
    seen = []
    for key in ("a", "a", "b"):
        jit.compile_once(key, lambda key=key: seen.append(key))
    assert seen == ["a", "b"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    jit.compile_once("c", lambda: seen.append("c"))
    assert seen == ["a", "b"]
