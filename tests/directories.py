"""Tiny directories on disk, the command line in this process, and transformers as the judge of a directory's NLL.

Model files are written with the safetensors library, not with the package's own writer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cortiq_kernels import cli
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import Weights

SMALL = ("--device", "cpu", "--window", "32", "--batch", "1")


def load_conftest(folder: str) -> ModuleType:
    """The builders of another folder's conftest.py."""
    path = Path(__file__).parent / folder / "conftest.py"
    spec = importlib.util.spec_from_file_location(f"{folder}_builders", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors_of(config: dict[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """Random published float32 tensors of a config (std 0.15, vectors moved from their init)."""
    g = Geometry.from_config(config)
    w = Weights.random(g, seed=seed, dtype=torch.float32, train="all", std=0.15, vector_noise=0.03)
    return {name: t.clone() for name, t in w.export().items()}


def nested(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same model as the text part of a multimodal checkpoint."""
    text = {k: v for k, v in config.items() if k != "architectures"}
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    renamed = {n.replace("model.", "model.language_model.", 1) if n != "lm_head.weight" else n: t
               for n, t in tensors.items()}  # fmt: skip
    return whole, renamed


def write_dir(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, shards: int = 1) -> Path:
    """config.json and safetensors, one file or `shards` with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {n: t.contiguous() for n, t in tensors.items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    where = {n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(tensors)}
    for file in sorted(set(where.values())):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, path / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def read_dir(path: Path) -> dict[str, Tensor]:
    """Every tensor of every safetensors file in a directory."""
    return {n: t for file in sorted(path.glob("*.safetensors")) for n, t in load_file(file).items()}


def records(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def id_rows(vocab: int, lengths: Sequence[int], split: str = "test", *, first: int = 0, seed: int = 0) -> list[dict]:
    """Rows of random ids of these lengths; each has its own rid and category."""
    gen = torch.Generator().manual_seed(seed)
    return [
        {"rid": f"{split}{i}", "split": split, "category": f"{split}{i}", "first_target": first,
         "ids": torch.randint(vocab, (n,), generator=gen).tolist()}
        for i, n in enumerate(lengths)
    ]  # fmt: skip


class Done(NamedTuple):
    """A finished command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


def cortiq(*args: object) -> Done:
    """Run the command line; its exit status and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main([str(a) for a in args])
    return Done(status, out.getvalue(), err.getvalue())


def snapshot(root: Path) -> dict[str, Any]:
    """Every path under `root`: (mode, link target or contents)."""
    found = {}
    for p in sorted(root.rglob("*")):
        what = str(p.readlink()) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        found[str(p.relative_to(root))] = (p.lstat().st_mode, what)
    return found


def refused(root: Path, *args: object) -> str:
    """The one line of a command that is refused: status 2, nothing on stdout, nothing under `root` changed."""
    before = snapshot(root)
    done = cortiq(*args)
    assert (done.status, done.out) == (2, ""), done
    assert done.err.count("\n") == 1 and done.err.endswith("\n"), done.err
    assert snapshot(root) == before
    return done.err


def nll(*args: object, model: Path, data: Path, split: str = "test") -> tuple[float, int]:
    """(NLL, scored tokens) that `cortiq score` reports for one model."""
    more = ("--dtype", "f64", *SMALL, "--splits", split, "--json", *args)
    row = cortiq("score", "--models", model, "--data", data, *more).json["rows"][0]
    return row["nll"], row["count"]


def transformers_nll(path: Path, rows: Iterable[dict[str, Any]]) -> float:
    """Mean NLL of the scored tokens of rows of ids, each alone, by transformers in float64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    losses = []
    for row in rows:
        ids = torch.tensor(row["ids"])
        with torch.no_grad():
            logq = torch.log_softmax(model(ids[None], use_cache=False).logits[0].double(), -1)
        first = max(row["first_target"], 1)
        losses += (-logq[first - 1 : -1].gather(1, ids[first:, None])).flatten().tolist()
    return math.fsum(losses) / len(losses)
