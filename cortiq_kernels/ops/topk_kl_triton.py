"""The loss pass of `topk_kl.py` on a slab of logits, as one Triton kernel: read once, written once, in place.

Per row of the slab, z the logits (after temperature and soft cap), t the merged targets, P = Σ t, w the row's weight:

    RATIO    E_v = exp(z_v − ref), and exp(z_v − ref) − t_v·s/P in the K slots;  r = w·grad_scale·P/s  with
             s = Σ exp(z_v − ref):   dz = r·E exactly, so that dH = r·(E·W) and dW = Eᵀ·(r·h)
    SCALED   dz itself, from a read-only sweep for the log-sum-exp and a second one that writes
    FORWARD  the read-only sweep (with a tail the slots are taken out of the slab before it, as in SCALED)

One sweep is enough for the sum because its reference is known beforehand: the largest of the K slots, which the
student's own largest logit seldom passes. It need not be close, since exp(60) is far from what float32 and bfloat16
can hold; where a tile exceeds it by more than that (LIMIT), the tile's own largest takes over, and what is summed, and
in RATIO written, is scaled down. E is not normalised, so that its slots are formed in float32 and rounded once:
rounding E and t apart would lose a small q − t. float16 has no such range, and the tail bucket no such factor (P −
p_t·Q/(1 − Q) passes through 0): both take SCALED.

Row pointers are 64-bit (R·V passes 2^31 at 8649 rows of 248,320). One program a row, no atomics: same inputs, same
bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cortiq_kernels.ops import jit

FORWARD, RATIO, SCALED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LIMIT = tl.constexpr(60.0)  # exp(60) times 2^18 columns is 3e31
BLOCK, WARPS = 4096, 8
SLOTS = tl.constexpr(16)  # slots that all others are compared with at a time


@triton.jit
def _logits(raw, mask, inv_temperature, softcap, SOFTCAP: tl.constexpr):
    """Slab values -> z after temperature and soft cap, in f32; masked ones are −inf already and stay so."""
    z = raw.to(tl.float32) * inv_temperature
    if SOFTCAP:
        # tanh(y) = 1 − 2/(exp(2y) + 1): right at both ends, where exp is 0 or inf
        z = tl.where(mask, softcap * (1 - 2 / (tl.exp(2 * z / softcap) + 1)), float("-inf"))
    return z


@jit.kernel
def head_kl_kernel(
    z_ptr,  # [R, V] slab, in place unless FORWARD
    ids_ptr,  # [R, K] int32
    probs_ptr,  # [R, K] f32
    weight_ptr,  # [R] f32, 0 = the row does not count
    scale_ptr,  # [] f64, the gradient's factor
    loss_ptr,  # [R] f32
    ratio_ptr,  # [R] f32, r in RATIO
    vocab,
    k,
    z_stride,
    ids_stride,
    probs_stride,
    inv_temperature,
    softcap,
    MODE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TAIL: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of the slab a program: its loss, and in place E (with r) or dz; see the module's docstring."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    ids_ptr += row * ids_stride
    probs_ptr += row * probs_stride
    weight = tl.load(weight_ptr + row).to(tl.float32)
    lane = tl.arange(0, BLOCK)

    slot = tl.arange(0, K_PAD)
    ids = tl.load(ids_ptr + slot, mask=slot < k, other=-1)
    real = (ids >= 0) & (ids < vocab)
    p = tl.load(probs_ptr + slot, mask=real, other=0.0).to(tl.float32)  # [K_PAD]
    mass = tl.sum(p, 0)
    if (weight != 0) & (mass != 0):
        target = tl.zeros([K_PAD], tl.float32)  # every slot's merged probability
        copies = tl.zeros([K_PAD], tl.float32)
        for j in range(0, K_PAD, SLOTS):
            other = j + tl.arange(0, SLOTS)
            other_ids = tl.load(ids_ptr + other, mask=other < k, other=-1)
            other_p = tl.load(probs_ptr + other, mask=other < k, other=0.0).to(tl.float32)
            same = ids[:, None] == other_ids[None, :]  # [K_PAD, SLOTS]
            target += tl.sum(tl.where(same, other_p[None, :], 0.0), 1)
            copies += tl.sum(tl.where(same, 1.0, 0.0), 1)
        in_slot = tl.load(z_ptr + ids, mask=real, other=float("-inf"))
        z_slot = _logits(in_slot, real, inv_temperature, softcap, SOFTCAP)

        top_slot = tl.max(z_slot, 0)
        top_slot = tl.where(top_slot == float("-inf"), 0.0, top_slot)
        ref = top_slot
        if TAIL:
            # As a difference, 1 − Q of a sure student would be a rounding error of either sign: the slots are taken
            # out of the slab, and the sweep sums what they leave, against a reference of its own.
            tl.debug_barrier()
            tl.store(z_ptr + ids, tl.full([K_PAD], float("-inf"), z_ptr.dtype.element_ty), mask=real)
            tl.debug_barrier()
            ref = tl.full([], -1e30, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        ahead = tl.load(z_ptr + lane, mask=lane < vocab, other=float("-inf"))
        for start in range(0, vocab, BLOCK):
            cols = start + lane
            z = _logits(ahead, cols < vocab, inv_temperature, softcap, SOFTCAP)
            if TAIL and SOFTCAP:
                z = tl.where(ahead.to(tl.float32) == float("-inf"), float("-inf"), z)  # bent, a slot would be -softcap
            # the next tile is on its way while this one is worked on
            ahead = tl.load(z_ptr + BLOCK + cols, mask=BLOCK + cols < vocab, other=float("-inf"))
            top = tl.max(z, 0)
            if top - ref > LIMIT:
                down = tl.exp(ref - top)
                total *= down
                if MODE == RATIO:
                    for written in range(0, start, BLOCK):
                        e = tl.load(z_ptr + written + lane).to(tl.float32)
                        tl.store(z_ptr + written + lane, (e * down).to(z_ptr.dtype.element_ty))
                ref = top
            e = tl.exp(z - ref)
            total += e
            if MODE == RATIO:
                if SOFTCAP:
                    e *= 1 - (z / softcap) * (z / softcap)
                tl.store(z_ptr + cols, e.to(z_ptr.dtype.element_ty), mask=cols < vocab)
        s = tl.sum(total, 0)
        lse = ref + tl.log(s)
        missed = lse
        if TAIL:
            held = tl.sum(tl.where(real, tl.exp(z_slot - top_slot) / copies, 0.0), 0)
            larger = tl.maximum(ref, top_slot)
            lse = larger + tl.log(s * tl.exp(ref - larger) + held * tl.exp(top_slot - larger))

        log_q = z_slot - lse
        counts = real & (p != 0)
        loss = tl.sum(tl.where(counts, p * (tl.log(tl.where(counts, target, 1.0)) - log_q), 0.0), 0)
        inside = mass  # factor of q in the slots
        pull = 0.0
        if TAIL:
            rest = tl.maximum(1 - mass, 0.0)
            loss += tl.where(rest > 0, rest * (tl.log(tl.where(rest > 0, rest, 1.0)) - (missed - lse)), 0.0)
            inside = mass + rest
            pull = rest * held * tl.exp(top_slot - lse)  # p_t·Q
        tl.store(loss_ptr + row, loss)

        if MODE != FORWARD:
            scale = weight * tl.load(scale_ptr).to(tl.float32) * inv_temperature
            bend = tl.full([K_PAD], 1.0, tl.float32)
            if SOFTCAP:
                bend = 1 - (z_slot / softcap) * (z_slot / softcap)
            if MODE == RATIO:
                fixed = (tl.exp(z_slot - ref) - target * (s / mass)) * bend
                tl.store(ratio_ptr + row, scale * (mass / s))
            else:
                fixed = scale * (inside * tl.exp(log_q) - target) * bend
                for start in range(0, vocab, BLOCK):
                    cols = start + lane
                    raw = tl.load(z_ptr + cols, mask=cols < vocab, other=float("-inf"))
                    z = _logits(raw, cols < vocab, inv_temperature, softcap, SOFTCAP)
                    dz = (scale * mass) * tl.exp(z - lse)
                    if TAIL:
                        dz -= (scale * pull) * tl.exp(z - missed)
                    if SOFTCAP:
                        dz *= 1 - (z / softcap) * (z / softcap)
                    tl.store(z_ptr + cols, dz.to(z_ptr.dtype.element_ty), mask=cols < vocab)
            tl.debug_barrier()  # the sweep's writes to the slots come first
            tl.store(z_ptr + ids, fixed.to(z_ptr.dtype.element_ty), mask=real)
    else:
        tl.store(loss_ptr + row, 0.0)
        if MODE != FORWARD:
            if MODE == RATIO:
                tl.store(ratio_ptr + row, 0.0)
            for start in range(0, vocab, BLOCK):
                cols = start + lane
                tl.store(z_ptr + cols, tl.zeros([BLOCK], z_ptr.dtype.element_ty), mask=cols < vocab)


def launch(
    z: Tensor,
    ids: Tensor,
    probs: Tensor,
    weight: Tensor,
    scale: Tensor,
    loss: Tensor,
    ratio: Tensor,
    *,
    mode: int,
    temperature: float = 1.0,
    softcap: float = 0.0,
    tail: bool = False,
) -> None:
    """Run the kernel on a slab z [R, V], unit column stride; `loss` and `ratio` [R] f32 are filled (see the kernel)."""
    rows, vocab = z.shape
    if rows == 0:
        return
    head_kl_kernel[(rows,)](
        z,
        ids,
        probs,
        weight,
        scale,
        loss,
        ratio,
        vocab,
        ids.shape[1],
        z.stride(0),
        ids.stride(0),
        probs.stride(0),
        1.0 / temperature,
        softcap or 1.0,
        MODE=mode,
        SOFTCAP=softcap > 0,
        TAIL=tail,
        K_PAD=max(16, triton.next_power_of_2(ids.shape[1])),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
