"""Train the small model that ships with the project, from scratch, with the project's own step.

    python examples/small_model/train.py --data .corpus --out .corpus/run [--steps 1500 | --minutes 8] [--device cuda]

Everything trains (train="all") on the next-token loss (alpha = 1). Reads `train.npz` and `val.npz` (uint16 tokens of
whole files, each closed by the eos token) and the tokenizer directory, and writes a Hugging Face directory plus
`train_log.jsonl`. On a GPU the gradients of a step are captured as one CUDA graph: with a model this small the host
could not launch the kernels fast enough otherwise. With `--minutes` the number of steps is fitted to the time from
the speed of the first ones, so that the cosine schedule ends when the time does. The weights with the best held-out
loss are written.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model import create_model
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Evaluator, Micro, Trainer
from cortiq_kernels.step.loss import next_token_targets
from cortiq_kernels.step.update import AdamOptions

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
    "eos_token_id": [0, 2],
    "pad_token_id": 0,
    "dtype": "bfloat16",
}


def window_batch(tokens: np.ndarray, starts: np.ndarray, window: int, device: torch.device) -> Batch:
    """One batch of windows cut at `starts`, each its own sequence, every row scored."""
    rows = np.stack([tokens[s : s + window + 1] for s in starts]).astype(np.int64)  # [B, T + 1]
    n = rows.shape[0] * window
    return Batch(
        tokens=torch.from_numpy(rows[:, :-1].reshape(-1).copy()),
        next_ids=torch.from_numpy(rows[:, 1:].reshape(-1).copy()),
        row_index=torch.arange(n, dtype=torch.int32),
        row_weight=torch.ones(n),
        cu_seqlens=torch.arange(0, n + 1, window, dtype=torch.int32),
        max_seqlen=window,
        weight_sum=float(n),
        n_scored=n,
        n_tokens=(window,) * rows.shape[0],
    ).to(device)


def epochs(n_tokens: int, window: int, batch: int, rng: np.random.Generator):
    """Starts of `batch` windows at a time: every pass cuts the corpus at another offset and shuffles the windows."""
    while True:
        starts = np.arange(rng.integers(window), n_tokens - window - 1, window)
        rng.shuffle(starts)
        for i in range(0, len(starts) - batch + 1, batch):
            yield starts[i : i + batch]


class GraphedStep:
    """Trainer.step with the gradients replayed from a CUDA graph; the batch is copied into fixed memory first."""

    def __init__(self, trainer: Trainer, batch: Batch):
        self.trainer = trainer
        self.micro = Micro(batch, next_token_targets(batch))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                trainer.gradients([self.micro])
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = trainer.gradients([self.micro])

    def __call__(self, batch: Batch, rate: float) -> None:
        self.micro.batch.tokens.copy_(batch.tokens)
        self.micro.targets.ids.copy_(batch.next_ids.to(torch.int32)[:, None])
        self.graph.replay()
        self.trainer.loss = self.loss
        self.trainer.apply(rate)


def plain_step(trainer: Trainer):
    def step(batch: Batch, rate: float) -> None:
        trainer.step([Micro(batch, next_token_targets(batch))], rate)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="directory with train.npz, val.npz and tokenizer/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=0, help="fixed number of steps instead of --minutes")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eval-every", type=int, default=250)
    args = parser.parse_args()

    begun = time.time()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    train = np.load(args.data / "train.npz")["tokens"]
    val = np.load(args.data / "val.npz")["tokens"]
    geometry = Geometry.from_config(CONFIG)
    weights = Weights.random(geometry, seed=20261130, dtype=dtype, device=device, train="all")
    n = args.batch * args.window
    options = AdamOptions(beta2=0.95, weight_decay=args.weight_decay)
    trainer = Trainer(weights, n, args.window, options)
    evaluator = Evaluator(weights, n, args.window, trainer.buffers)
    rng = np.random.default_rng(1)
    batches = epochs(len(train), args.window, args.batch, rng)
    first = window_batch(train, next(batches), args.window, device)
    step = GraphedStep(trainer, first) if device.type == "cuda" else plain_step(trainer)

    val_starts = np.arange(0, len(val) - args.window - 1, args.window)
    val_starts = val_starts[: max(args.batch, len(val_starts) // args.batch * args.batch)][: 8 * args.batch]
    val_batches = [
        window_batch(val, val_starts[i : i + args.batch], args.window, device)
        for i in range(0, len(val_starts) - args.batch + 1, args.batch)
    ]
    val_micros = [Micro(b, next_token_targets(b)) for b in val_batches]

    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "train_log.jsonl").open("w")

    def say(**fields) -> None:
        print(json.dumps(fields), flush=True)
        log.write(json.dumps(fields) + "\n")

    total, done, timed_from = args.steps or 10**9, 0, 0.0
    best, best_state = math.inf, weights.state()
    probe = 30
    while done < total:
        if done == probe - 20:
            trainer.read()
            timed_from = time.time()
        if done == probe and not args.steps:
            trainer.read()
            per_step = (time.time() - timed_from) / 20
            left = args.minutes * 60 - (time.time() - begun) - 20  # 20 s for evaluations and the export
            total = done + max(1, int(left / per_step))
            passes = total * n / len(train)
            say(event="fitted", ms_per_step=per_step * 1e3, steps=total, tokens=total * n, passes=passes)
        done += 1
        warm = 300 if not args.steps else max(1, total // 10)
        progress = min(1.0, max(0.0, (done - warm) / max(1, total - warm)))
        rate = args.lr * min(1.0, done / warm) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        step(window_batch(train, next(batches), args.window, device), rate)
        if done % args.eval_every == 0 or done == total:
            stats = trainer.read()
            held = evaluator.loss(val_micros) if val_micros else float("nan")
            say(event="eval", step=done, loss=stats.loss, val=held, norm=stats.norm, skipped=stats.skipped,
                seconds=round(time.time() - begun, 1))  # fmt: skip
            if not held >= best:
                best, best_state = held, weights.state(best_state)
    weights.load_state(best_state)
    # Matrices ship in bf16; vectors (norms, A_log, dt_bias) stay in f32, so that nothing a gate depends on is rounded.
    tensors = {n: t.to(torch.bfloat16) if t.dim() > 1 else t for n, t in weights.export().items()}
    create_model(args.out / "model", CONFIG, tensors, tokenizer_dir=args.data / "tokenizer")
    parameters = sum(t.numel() for t in tensors.values())
    say(event="done", best_val=best, steps=done, seconds=round(time.time() - begun, 1), parameters=parameters)


if __name__ == "__main__":
    main()
