"""The step that a user of transformers would take instead: its Qwen3.5 under torch.compile with FLA's kernels (and
FlashQLA's, where that is installed), the loss compiled and in chunks, torch's fused Adam on float32 masters.

Same geometry, tokens, targets, layers that train and clipping as `bench.step`; weights of transformers' own drawing.
Its losses go through the same gate. Without transformers, FLA or a compiler there is no peer, and the result says why.
FlashQLA compiles for 60 to 90 s on the first call of a head shape, torch.compile for about as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.timing import Timing, measure
from cortiq_kernels import backend
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.step import Micro

LOSS_ROWS = 2048  # of a chunk of the loss: as fast as any, and memory that fits beside a model


def model_of(g: Geometry, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' model of a geometry with random weights, FLA's kernels in the place of its torch operations."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    if device.type == "cuda":
        _use_fla(modeling)
    config: Any = Qwen3_5TextConfig(
        vocab_size=g.vocab, hidden_size=g.hidden, intermediate_size=g.intermediate[0], num_hidden_layers=g.n_layers,
        num_attention_heads=g.nq, num_key_value_heads=g.nkv, head_dim=g.hd, linear_num_key_heads=g.nk,
        linear_num_value_heads=g.nv, linear_key_head_dim=g.dk, linear_value_head_dim=g.dv,
        linear_conv_kernel_dim=g.conv, layer_types=list(g.layer_types), tie_word_embeddings=g.tied,
        max_position_embeddings=g.max_position, rms_norm_eps=g.eps,
        rope_parameters={
            "rope_type": "default", "rope_theta": g.rope_theta, "partial_rotary_factor": g.rot / g.hd,
        },
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    with device:
        model: Any = modeling.Qwen3_5ForCausalLM(config)
    return model.to(dtype)


def _use_fla(modeling: Any) -> None:
    from fla.modules.causal_conv1d.ops import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any) -> Tensor:
        y, _ = causal_conv1d(x.transpose(1, 2), weight.to(x.dtype), bias, activation=activation)
        return y.transpose(1, 2)

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **more: Any) -> Any:
        taken = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
        return chunk_gated_delta_rule(q, k, v, g.float(), beta, **{k: more[k] for k in taken if k in more})

    modeling.causal_conv1d_fn, modeling.torch_chunk_gated_delta_rule = conv, rule


class PeerStep:
    """A step of distillation by autograd. `compiled`: the model's body and the loss."""

    def __init__(
        self, g: Geometry, micro: Micro, rate: float, device: torch.device, dtype: torch.dtype, *, compiled: bool
    ):
        self.model, self.micro = model_of(g, device, dtype), micro
        for p in (self.model.model.embed_tokens.weight, self.model.lm_head.weight, *self.model.model.norm.parameters()):
            p.requires_grad_(False)  # the layers train, as in `bench.step`
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.params]
        self.adam = torch.optim.Adam(self.masters, lr=rate, fused=True)
        self.body: Callable[..., Any] = torch.compile(self.model.model, dynamic=False) if compiled else self.model.model
        self.loss: Callable[..., Tensor] = torch.compile(_loss, dynamic=False) if compiled else _loss
        self.windows = len(micro.batch.tokens) // micro.batch.max_seqlen

    def __call__(self) -> Tensor:
        """-> the mean loss, before the update."""
        batch, targets = self.micro.batch, self.micro.targets
        ids = batch.tokens.view(self.windows, -1)
        hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        index = batch.row_index.long()
        rows = [x.requires_grad_() for x in hidden.detach()[index].split(LOSS_ROWS)]
        total = torch.zeros((), device=hidden.device)
        for x, tokens, probs in zip(rows, targets.ids.split(LOSS_ROWS), targets.probs.split(LOSS_ROWS), strict=True):
            loss = self.loss(x, self.model.lm_head.weight, tokens, probs) / batch.weight_sum
            loss.backward()
            total += loss.detach()
        dhidden = torch.zeros_like(hidden)
        dhidden[index] = torch.cat([x.grad for x in rows if x.grad is not None])
        hidden.backward(dhidden)
        for p, master in zip(self.params, self.masters, strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)
        return total


def _loss(x: Tensor, head: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Sum over rows of KL(target || softmax)."""
    z = (x @ head.t()).float()
    log_q = z.gather(1, ids.long()) - torch.logsumexp(z, -1, keepdim=True)
    return (probs * (probs.log() - log_q)).sum()


def measure_peer(
    g: Geometry, micro: Micro, rate: float, device: torch.device, dtype: torch.dtype, *, compiled: bool = True
) -> tuple[Timing, list[float], float, int | None]:
    """(time of a step, losses, seconds of the first step, peak bytes)."""
    backend.reset_peak(device)
    began = time.perf_counter()
    step = PeerStep(g, micro, rate, device, dtype, compiled=compiled)
    losses = [step()]
    backend.synchronize(device)
    first = time.perf_counter() - began
    timing = measure([lambda: losses.append(step())], device)
    return timing, [float(x) for x in losses], first, backend.peak_bytes(device)
