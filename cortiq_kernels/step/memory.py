"""Bytes that a step takes, before there is one: pure arithmetic over the geometry, no tensors on any device.

    buffers    what `Buffers` preallocates, and on a GPU its slab of logits, unless that lies in gradients (`spare.py`)
    saved      what the ops keep for the backward besides: the mixers' tensors and the norms' rstd, of the kept layers
               (policy "layer" keeps no mixer's: that of the one layer that is run again counts as workspace)
    workspace  the most that one layer's forward or backward has alive for itself, or the update
    head       the slab of logits (but for one that a training step keeps) and what the loss, or the top-k, makes of it

    peak = buffers + saved + max(workspace, head)

`buffers` and `saved` are exact for the ops in plain torch (tests hold them against the tensors). `workspace` and `head`
follow the ops' code: elements a token, found by counting and held against the peaks of whole runs, to 20 % on a CPU and
10 % on a GPU (the Gated DeltaNet kernels by counting alone). An op that changes what it keeps, or gets a kernel that
needs less, changes its lines here: `mixer_saved` and `layer_workspace`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import acc_dtype
from cortiq_kernels.ops.attention import dims as attention_dims
from cortiq_kernels.ops.attention.torch_path import BLOCK_Q
from cortiq_kernels.ops.gated_delta.layout import CHUNK, unfit_for_kernels
from cortiq_kernels.ops.topk_kl import CHUNK_ROWS
from cortiq_kernels.step.buffers import Buffers, Policy
from cortiq_kernels.step.spare import slab_fits

_GDN_CHUNK = {"cpu": 32, "cuda": 64}  # tokens a chunk of Gated DeltaNet
_CPU_SLAB = 1 << 25  # elements of a slab of logits on a CPU
_ADAM_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 26}  # elements that an update works on at a time
_ADAM_COPIES = 7  # of a chunk: g, m, v, their root, p, the step, and what is selected


class StepBytes(NamedTuple):
    """See the module docstring."""

    buffers: int
    saved: int
    workspace: int
    head: int

    @property
    def peak(self) -> int:
        """Most bytes at a time, weights and optimizer not counted."""
        return self.buffers + self.saved + max(self.workspace, self.head)


def train_bytes(
    g: Geometry, n: int, window: int, rows: int, dtype: torch.dtype, device: str, *, first: int, train_from: int,
    trained: int, mixers_from: int = 0, policy: Policy = "cheap", train: str | None = "layers", sequences: int = 0,
    spare: int = 0,
) -> StepBytes:  # fmt: skip
    """A training step of `n` tokens in windows of `window`, `rows` of them scored, on a `device` type.

    The student holds layers `first ..` and trains those from `train_from` on; `trained`: elements of its masters.
    `mixers_from`, `policy`, `train`: those of `Buffers`. `sequences`: those that cu_seqlens has room for (0: the
    windows), each of which is a chunk more for the kernels of Gated DeltaNet. `spare`: elements of gradients that may
    hold the slab of logits (those of `spare_run`; 0 where micro-batches add up).
    """
    acc = acc_dtype(dtype).itemsize
    buffers = Buffers(
        g, n, dtype, torch.device("meta"), first=first, save_from=train_from, mixers_from=mixers_from, policy=policy,
        train=train,
    )  # fmt: skip
    kept, layers = range(train_from, g.n_virtual), range(first, g.n_virtual)
    saved = n * acc + sum((2 + g.norm_after(i)) * n * acc for i in kept)
    room: dict[str, Any] = {"sequences": sequences, "policy": policy}
    mixers = {i: mixer_saved(g, i, n, window, dtype, device, **room) for i in kept if i >= mixers_from}
    work = [layer_workspace(g, i, n, window, dtype, device, backward=False, **room) for i in layers if i not in mixers]
    if policy != "layer":
        saved += sum(mixers.values())
        mixers = dict.fromkeys(mixers, 0)
    work += [
        own + layer_workspace(g, i, n, window, dtype, device, backward=True, **room) for i, own in mixers.items()
    ]
    work += [mlp_workspace(g, i, n, dtype, device, backward=True) for i in kept]
    in_kernels = device == "cuda" and dtype != torch.float64
    update = 0 if in_kernels else _ADAM_COPIES * acc * min(trained, _ADAM_CHUNK.get(device, _ADAM_CHUNK["cpu"]))
    head, slab = head_bytes(g, rows, dtype, device, backward=True), 0
    if in_kernels:  # the slab stays (`Buffers.logits_slab`)
        head -= slab_elements(g.vocab, rows, device) * dtype.itemsize
        if not slab_fits(spare, n, g.vocab, dtype, acc_dtype(dtype)):
            slab = slab_elements(g.vocab, n, device) * dtype.itemsize
    return StepBytes(buffers.nbytes + slab, saved, max(*work, update), head)


def forward_bytes(
    g: Geometry, n: int, window: int, rows: int, dtype: torch.dtype, device: str, *, slabs: float = 1.0
) -> StepBytes:
    """A forward pass of the whole stack that keeps nothing; `rows` go through the head (0: none), which has `slabs`
    slabs of logits alive in the accumulation dtype besides the one in `dtype`.
    """
    buffers = Buffers(g, n, dtype, torch.device("meta"))
    work = [layer_workspace(g, i, n, window, dtype, device, backward=False) for i in range(g.n_layers)]
    slab = slab_elements(g.vocab, rows, device)
    head = int(slab * (dtype.itemsize + slabs * acc_dtype(dtype).itemsize)) + rows * g.hidden * dtype.itemsize
    return StepBytes(buffers.nbytes, 0, max(work), head)


def mixer_saved(
    g: Geometry, layer: int, n: int, window: int, dtype: torch.dtype, device: str, *, policy: Policy = "cheap",
    sequences: int = 0,
) -> int:  # fmt: skip
    """Bytes that a mixer's forward keeps for its backward, the caller's projection not counted.

    Attention: the log-sum-exp, and o before the gate (without a gate that is the layer's mix slot). Gated DeltaNet, per
    value head: the states that enter each chunk and the last one, T, V' and o, in the accumulation dtype, windows
    padded to whole chunks; its kernels keep the states of every second chunk, T, V' and o in the working dtype, decay
    sums and the norm's rstd in f32, and unless the policy is "cheap" q, k and v as the convolution leaves them (one
    tensor, of which q and k are read).
    """
    acc = acc_dtype(dtype).itemsize
    if g.is_full(layer):
        return n * g.nq * ((g.hd * dtype.itemsize if g.attn_gate else 0) + acc)
    if gdn_kernels(g, dtype, device):
        qkv = 0 if policy == "cheap" else n * g.conv_channels
        half = _kernel_states(g, n, 2 * (sequences or n // window)) // 2
        return (g.nv * (half + n * (CHUNK + 2 * g.dv)) + qkv) * dtype.itemsize + 8 * n * g.nv
    chunk = gdn_chunk(window, device)
    chunks = -(-window // chunk) * (n // window)
    states = (chunks + n // window) * g.dk * g.dv
    return acc * g.nv * (states + chunks * chunk * (chunk + 2 * g.dv))


def layer_workspace(
    g: Geometry, layer: int, n: int, window: int, dtype: torch.dtype, device: str, *, backward: bool,
    policy: Policy = "cheap", sequences: int = 0,
) -> int:  # fmt: skip
    """Most bytes that the mixer or the MLP of a layer has alive for itself."""
    acc = acc_dtype(dtype).itemsize
    mlp = mlp_workspace(g, layer, n, dtype, device, backward=backward)
    mixer: float
    if g.is_full(layer):
        q, kv = g.nq * g.hd, g.nkv * g.hd
        if attention_kernels(g, dtype, device):
            sums = 4 * n * g.nq
            if not backward:
                return max(mlp, dtype.itemsize * n * (2 * q + 2 * kv) + sums)
            alone = 4 * n * q  # cuDNN sums dq in float32
            return max(mlp, dtype.itemsize * n * (3 * q + 4 * kv) + sums + alone)
        scores = 2.5 * g.nq * min(BLOCK_Q.get(device, BLOCK_Q["cpu"]), window)
        mixer = acc * n * ((5 * q + 4 * kv if backward else 2.5 * q + 3 * kv) + scores)
    elif gdn_kernels(g, dtype, device):
        keys, v = 2 * g.nk * g.dk, g.nv * g.dv
        leaving, half = (g.nv * _kernel_states(g, n, k * (sequences or n // window)) // k for k in (1, 2))
        if backward:  # q^ and k^, their gradients, do, Y, gradients of states, odd states; beta, dbeta, dG
            again = keys if policy == "cheap" else 0
            mixer = dtype.itemsize * (n * (again + keys + 2 * v) + leaving + half) + 16 * n * g.nv
        else:
            odd = dtype.itemsize * half + 4 * n * g.nv  # and beta
            kept = mixer_saved(g, layer, n, window, dtype, device, sequences=sequences)
            mixer = dtype.itemsize * n * (keys + v) + odd + kept
    else:
        chunk = gdn_chunk(window, device)
        conv, v = 2 * g.nk * g.dk + g.nv * g.dv, g.nv * g.dv
        states = g.nv * g.dk * g.dv / chunk
        if backward:
            mixer = acc * n * (3.5 * conv + 10 * v + 8 * g.nv * chunk + states)
        else:
            mixer = acc * n * (3 * conv + 5 * v + 4 * g.nv * chunk) + mixer_saved(g, layer, n, window, dtype, device)
    return int(max(mlp, mixer))


def mlp_workspace(g: Geometry, layer: int, n: int, dtype: torch.dtype, device: str, *, backward: bool) -> int:
    """Most bytes that the MLP of a layer has alive for itself; its kernels work in place, but for a few sums."""
    if device == "cuda" and dtype != torch.float64:
        return 0
    acc = acc_dtype(dtype).itemsize
    cast = 0 if dtype.itemsize == acc else 1  # 16-bit operands are converted first
    return n * g.intermediate[g.physical(layer)] * acc * ((4 + 3 * cast) if backward else (1 + 2 * cast))


def head_bytes(g: Geometry, rows: int, dtype: torch.dtype, device: str, *, backward: bool) -> int:
    """Bytes of the head with its loss on `rows` scored rows.

    On a GPU one slab of logits, worked on in place, and the gradient of its rows in f32; in plain torch the slab in the
    working dtype and a copy or two in the accumulation dtype.
    """
    acc = acc_dtype(dtype).itemsize
    slab = slab_elements(g.vocab, rows, device)
    if device == "cuda" and dtype != torch.float64:
        return slab * dtype.itemsize + min(rows, CHUNK_ROWS) * g.hidden * (4 + dtype.itemsize)
    return slab * ((2 * acc if dtype.itemsize == acc else 2 * acc + dtype.itemsize) if backward else 2 * acc)


def slab_elements(vocab: int, rows: int, device: str) -> int:
    """Logits that are alive at a time."""
    most = CHUNK_ROWS if device == "cuda" else max(1, _CPU_SLAB // vocab)
    return min(rows, most) * vocab


def gdn_kernels(g: Geometry, dtype: torch.dtype, device: str) -> bool:
    """Whether Gated DeltaNet runs on its kernels there."""
    return device == "cuda" and dtype != torch.float64 and not unfit_for_kernels(dtype, g.dk, g.dv)


def attention_kernels(g: Geometry, dtype: torch.dtype, device: str) -> bool:
    """Whether softmax attention runs on kernels there."""
    return device == "cuda" and dtype != torch.float64 and not attention_dims.unfit_for_kernels(dtype, g.hd)


def _kernel_states(g: Geometry, n: int, sequences: int) -> int:
    """Elements of the states that enter the chunks, of one head: room for a part of a chunk in every sequence."""
    return (n // CHUNK + sequences) * g.dk * g.dv


def gdn_chunk(window: int, device: str) -> int:
    """Tokens a chunk of Gated DeltaNet: a power of two from 16 on, no longer than a window needs."""
    chunk = 16
    while chunk < min(window, _GDN_CHUNK.get(device, _GDN_CHUNK["cpu"])):
        chunk *= 2
    return chunk
