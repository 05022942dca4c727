"""Choices come with reasons; requests that cannot be met are errors; asking for nothing touches no device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from cortiq_kernels import backend, env

CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_cpu_is_there_when_asked_for():
    choice = backend.pick_device("cpu")
    assert choice.device == CPU and choice.reason == "asked for"


@no_gpu
def test_auto_falls_back_and_says_why():
    choice = backend.pick_device("auto")
    assert choice.device == CPU and choice.reason.startswith("no GPU: ")


@no_gpu
@pytest.mark.parametrize("request_", ["cuda", "cuda:0", "cuda:3"])
def test_an_explicit_gpu_that_is_not_there_is_an_error(request_):
    with pytest.raises(ValueError, match="expected a GPU"):
        backend.pick_device(request_)


@pytest.mark.parametrize("request_", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "mps", "cudax"])
def test_unknown_devices(request_):
    with pytest.raises(ValueError, match="expected auto, cpu, cuda or cuda:N"):
        backend.pick_device(request_)


def test_dtypes():
    assert backend.pick_dtype(None, CPU).dtype == torch.float32
    assert backend.pick_dtype(None, torch.device("cuda", 0)).dtype == torch.bfloat16
    assert backend.pick_dtype("f16", torch.device("cuda", 0)).dtype == torch.float16
    assert backend.pick_dtype("f64", CPU).dtype == torch.float64
    for half in ("bf16", "f16"):
        with pytest.raises(ValueError, match="CPU"):
            backend.pick_dtype(half, CPU)
    with pytest.raises(ValueError, match="f8"):
        backend.pick_dtype("f8", CPU)
    assert [backend.dtype_name(d) for d in backend.DTYPES.values()] == list(backend.DTYPES)


def test_memory_and_versions():
    assert backend.free_bytes(CPU) > 1 << 20
    assert backend.peak_bytes(CPU) is None
    backend.synchronize(CPU)
    backend.release(CPU)
    v = backend.versions()
    assert v["torch"] == torch.__version__.split("+")[0] or v["torch"] == torch.__version__
    assert {"cortiq_kernels", "python", "triton", "cuda"} <= v.keys()


def test_deterministic_restores_what_was():
    before = torch.are_deterministic_algorithms_enabled()
    with backend.deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_env_says_which_backend_and_why(capsys):
    assert env.main(["--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert {o["op"] for o in info["ops"]} == set(env.OPS)
    assert all(o["cpu"] and o["reason"] for o in info["ops"])
    assert isinstance(info["native"]["present"], bool) and info["native"]["reason"]
    assert env.main([]) == 0
    text = capsys.readouterr().out
    assert "native module" in text and "gdn_mixer" in text


def test_import_asks_nothing():
    code = (
        "import torch; torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = None;"
        "import cortiq_kernels.backend, cortiq_kernels.env"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
