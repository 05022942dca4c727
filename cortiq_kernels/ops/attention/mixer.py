"""Softmax attention between the two projections: causal GQA with RoPE; bias, q/k norm and output gate where a model has
them.

One row of `proj` is nq·(q hd | gate hd) | k nkv·hd | v nkv·hd; without a gate, q nq·hd comes first. Rows
form a grid [B, T], T = max_seqlen, and `cu_seqlens` says where sequences start; a sequence sees only itself, and
positions restart at 0 in each.

Maths (per token and head; rope turns the first `rot` dimensions, half-split; h' = h // (nq/nkv))
    proj + bias, then
    q̃ = rope(q̂·gain),  k̃ = rope(k̂·gain)                        x̂ = x·(mean(x²) + eps)^-½ over hd
        gain = 1 + q_norm (k_norm), or q_norm itself without `zero_centered`; without norms q̃ = rope(q), k̃ = rope(k)
    S = q̃·k̃ᵀ/√hd on keys of the same sequence that are not in the future;  P = softmax(S) = exp(S − lse)
    o = P·v,   out = o·σ(gate), or o
Gradients
    do = dout·σ(gate),  dgate = dout·o·σ(gate)·(1 − σ(gate));  without a gate do = dout
    dv = Pᵀ·do,  dP = do·vᵀ,  dS = P·(dP − rowsum(do·o)),  dq̃ = dS·k̃/√hd,  dk̃ = dSᵀ·q̃/√hd
    dk̃ and dv sum over the nq/nkv query heads of a key head; then back through rope (turning by −angle) and the norm
    dq_norm = Σ over tokens and heads of d(q̂·gain)·q̂, dk_norm likewise;  dbias = Σ over tokens of dproj   (`=`, `+=`)

| tensor | shape | dtype |
|---|---|---|
| proj, dproj | [N, W], W = 2·nq·hd + 2·nkv·hd, or nq·hd + 2·nkv·hd | working: bf16, f16, f32, f64 |
| out, dout | [N, nq·hd] | working |
| q_norm, k_norm and their gradients | [hd] or None | f32 (f64 for f64) |
| bias, dbias | [W] or None | f32 (f64 for f64) |
| cos, sin | [≥ max_seqlen, rot/2] | f32 (f64 for f64) |
| cu_seqlens | [S+1] | int32, 0 … N, non-decreasing, may be padded with N |

Precision: from the working-dtype projection to out and dproj all in f32 (f64 for f64), the bias too (large ones, as
Qwen2's, cost no bits). The torch path rounds nothing in between; dbias there sums what is rounded into dproj before it
is. The kernels (bf16 and f16 on a GPU) round what enters or leaves softmax attention: q̃, k̃, do, dq̃, dk̃, with a bias v
and dv, P and dS; with SDPA's also o before the gate. Kept for the backward: proj itself, o before the gate (working
dtype; without a gate it is out itself) and lse; q̃ and k̃ are computed again. Every row of out and dproj is written,
padding rows too.
Which path: torch_path.py for CPU tensors, f32, f64 and heads above 256; else kernels around softmax attention
(triton_run.py), which is SDPA's (sdpa.py) where every window is one sequence, and one of our own where sequences are
packed or `torch.use_deterministic_algorithms` is on. All but SDPA's take every sum in a fixed order, so two runs are
bitwise equal; with our own, what a sequence is packed with changes no bit of it, and a NaN stays in it.
Sources: Vaswani et al. 2017; Su et al., "RoFormer", 2021; Rabe and Staats, "Self-attention Does Not Need O(n²) Memory",
2021; the backward from (o, lse) is Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

from torch import Tensor

from cortiq_kernels.ops import checks, configs
from cortiq_kernels.ops.gated_delta.layout import unit_stride
from cortiq_kernels.ops.sequences import SeqIndex, token_positions
from cortiq_kernels.ops.triton_gate import launching_on, missing, use_triton

from . import sdpa
from .blocks import AttnBlocks, attention_blocks
from .dims import AttnDims, AttnSaved, Given, VectorGrads, unfit_for_kernels
from .torch_path import torch_bwd, torch_fwd


def attention_mixer_fwd(
    proj: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    dims: AttnDims,
    cu_seqlens: Tensor,
    max_seqlen: int,
    eps: float,
    bias: Tensor | None = None,
    zero_centered: bool = True,
    out: Tensor | None = None,
    save: bool = True,
    index: SeqIndex | None = None,
    blocks: AttnBlocks | None = None,
    backend: str = "auto",
) -> tuple[Tensor, AttnSaved | None]:
    """-> (out [N, nq*hd], saved, or None with save=False). `out` is written with `=`; None allocates.

    Every multiple of max_seqlen is a sequence start. `index` is `sequence_index(cu_seqlens, N)` when the caller already
    has it (it is the same for every layer).
    """
    op = "attention_mixer_fwd"
    n = _check(op, proj, q_norm, k_norm, cos, sin, dims, cu_seqlens, max_seqlen, bias)
    out = checks.output(op, "out", out, (n, dims.nq * dims.hd), proj.dtype, proj)
    a = _given(op, proj, q_norm, k_norm, cos, sin, bias, dims, cu_seqlens, max_seqlen, eps, zero_centered, index)
    gpu = proj.is_cuda
    arch = configs.current_arch() if gpu and missing() is None else 0
    unfit = unfit_for_kernels(proj.dtype, dims.hd, gpu=gpu, arch=arch)
    if not use_triton(op, proj, backend, unfit) or n == 0:
        return out, torch_fwd(a, out, save)
    from .triton_run import mixer_fwd

    target = unit_stride(out)
    with launching_on(proj):
        a = a._replace(proj=unit_stride(proj))
        via = "triton" if backend == "triton" else sdpa.choose(proj, dims, cu_seqlens, max_seqlen)
        if via == "triton" and blocks is None:
            blocks = attention_blocks(cu_seqlens, n, dims)
        saved = mixer_fwd(a, via, blocks, target, save)
    if target is not out:
        out.copy_(target)
    return out, saved


def attention_mixer_bwd(
    dout: Tensor,
    saved: AttnSaved,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    dims: AttnDims,
    cu_seqlens: Tensor,
    max_seqlen: int,
    eps: float,
    bias: Tensor | None = None,
    zero_centered: bool = True,
    dproj: Tensor | None = None,
    dq_norm: Tensor | None = None,
    dk_norm: Tensor | None = None,
    dbias: Tensor | None = None,
    accumulate: bool = False,
    index: SeqIndex | None = None,
    blocks: AttnBlocks | None = None,
) -> Tensor:
    """-> dproj [N, width], written with `=`; None allocates. It must not overlap saved.proj.

    dq_norm, dk_norm [hd]: `=`, or `+=` with `accumulate`; None skips them.
    """
    op = "attention_mixer_bwd"
    proj = saved.proj
    n = _check(op, proj, q_norm, k_norm, cos, sin, dims, cu_seqlens, max_seqlen, bias)
    sizes = (n, dims.nq * dims.hd)
    checks.shape(op, "dout", dout, sizes, str(list(sizes)), "it is the gradient of the forward's out")
    checks.alike(op, "dout", dout, "proj", proj)
    dproj = checks.output(op, "dproj", dproj, proj.shape, proj.dtype, proj)
    for name, grad, weight in (("dq_norm", dq_norm, q_norm), ("dk_norm", dk_norm, k_norm), ("dbias", dbias, bias)):
        if grad is not None:
            if weight is None:
                checks.fail(op, name, f"None without {name[1:]}", tuple(grad.shape), "it is that vector's gradient")
            checks.vector(op, name, grad, weight.shape[0], "proj", proj)
            checks.writable(op, name, grad)

    a = _given(op, proj, q_norm, k_norm, cos, sin, bias, dims, cu_seqlens, max_seqlen, eps, zero_centered, index)
    grads = VectorGrads(dq_norm, dk_norm, dbias, accumulate)
    if saved.via == "torch":
        torch_bwd(dout, saved, a, dproj, grads)
        return dproj
    from .triton_run import mixer_bwd

    target = unit_stride(dproj)
    with launching_on(proj):
        if saved.via == "triton" and blocks is None:
            blocks = attention_blocks(cu_seqlens, n, dims)
        mixer_bwd(unit_stride(dout), saved, a, blocks, target, grads)
    return dproj if target is dproj else dproj.copy_(target)


def _given(
    op: str,
    proj: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    bias: Tensor | None,
    dims: AttnDims,
    cu_seqlens: Tensor,
    max_seqlen: int,
    eps: float,
    zero_centered: bool,
    index: SeqIndex | None,
) -> Given:
    positions = token_positions(op, cu_seqlens, proj.shape[0], index)
    return Given(proj, q_norm, k_norm, cos, sin, bias, positions, dims, max_seqlen, eps, zero_centered)


def _check(
    op: str,
    proj: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    dims: AttnDims,
    cu_seqlens: Tensor,
    max_seqlen: int,
    bias: Tensor | None,
) -> int:
    nq, nkv, hd, rot, gate = dims
    if min(nq, nkv, hd) < 1 or nq % nkv or rot % 2 or not 0 <= rot <= hd:
        checks.fail(op, "dims", "nq a multiple of nkv and rot even, at most hd", dims, "read them from the config")
    rows = f"rows are nq*{'(q|gate)' if gate else 'q'}, then k, then v"
    checks.shape(op, "proj", proj, (None, dims.width), f"[N, {dims.width}]", rows)
    checks.dtype(op, "proj", proj, checks.FLOATS, "convert it with .to()")
    if (q_norm is None) != (k_norm is None):
        checks.fail(op, "q_norm and k_norm", "both given or both None", "one of them", "a model has both or none")
    if bias is not None and gate:
        checks.fail(op, "bias", "None with an output gate", tuple(bias.shape), "set dims.gate to False, or drop it")
    for name, vector, size in (("q_norm", q_norm, hd), ("k_norm", k_norm, hd), ("bias", bias, dims.width)):
        if vector is not None:
            checks.vector(op, name, vector, size, "proj", proj)
    n = proj.shape[0]
    if max_seqlen < 1 or n % max_seqlen:
        checks.fail(op, "max_seqlen", f"a divisor of N = {n}", max_seqlen, "it is the window: N = batch*window")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 2 or table.shape[0] < max_seqlen or table.shape[1] != rot // 2:
            expected = f"[at least {max_seqlen}, {rot // 2}]"
            checks.fail(op, name, expected, tuple(table.shape), "build it with rope_table(max_seqlen, rot, ...)")
        checks.dtype(op, name, table, (checks.acc_dtype(proj.dtype),), "build it with rope_table")
        checks.same_device(op, name, table, "proj", proj)
    checks.shape(op, "cu_seqlens", cu_seqlens, (None,), "[S+1]", "it holds the sequence starts, then N")
    checks.dtype(op, "cu_seqlens", cu_seqlens, checks.INTS, "convert it with .to(torch.int32)")
    checks.same_device(op, "cu_seqlens", cu_seqlens, "proj", proj)
    return n
