"""Run transformers' Gated DeltaNet layers (Qwen3.5) on this package's operators, for training with autograd.

    python examples/transformers_gdn.py        # seconds on a CPU: the same outputs and gradients

Two ways, each a context manager; use one around the forward passes of a model, or enter it once and leave it open:

    with our_rule(): ...      only the recurrence. transformers calls the function `torch_chunk_gated_delta_rule` of the
                              model's module, for every forward of more than one token; it is replaced there.
    with our_mixer(): ...     everything between a layer's two projections in one operator: convolution, norms, gates,
                              recurrence and gated norm. The layer's `forward` is replaced, and calls that it does not
                              serve (a cache, or an `attention_mask` with padding) go to the original.

Packed sequences reach either as `cu_seq_lens_q`, as transformers' data collators make it, with a batch of one row.
`our_mixer` keeps them apart in the convolution too, for which transformers itself needs the package causal-conv1d.
Weights stay where they are: checkpoints, optimizers and adapters do not notice. On a CUDA device both run on Triton
kernels, and under torch.compile without a graph break.

What is left of a difference is rounding: transformers sums decays in float32, which shows in the gradients of A_log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from cortiq_kernels.ops.gated_delta import GdnDims
from cortiq_kernels.ops.library_gated_delta import chunk_gated_delta_rule, gdn_mixer


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def our_rule() -> contextlib.AbstractContextManager[None]:
    """The recurrence on `chunk_gated_delta_rule`."""

    def rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
        **_unused: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        return chunk_gated_delta_rule(
            query, key, value, g, beta, None, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
        )

    return _replaced(modeling, "torch_chunk_gated_delta_rule", rule)


def our_mixer() -> contextlib.AbstractContextManager[None]:
    """Whole layers on `gdn_mixer`."""
    layer_class = modeling.Qwen3_5GatedDeltaNet
    original = layer_class.forward

    def forward(
        self: nn.Module, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if cache is not None or attention_mask is not None:
            return original(self, hidden_states, cache, attention_mask, **kwargs)
        batch, length, _ = hidden_states.shape
        dims = GdnDims(self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim, self.conv_kernel_size)
        parts = (self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b)  # the order of a projection row
        proj = torch.cat([part(hidden_states) for part in parts], dim=-1).view(batch * length, dims.width)
        starts = kwargs.get("cu_seq_lens_q")
        if starts is None:
            starts = torch.arange(batch + 1, dtype=torch.int32, device=proj.device) * length
        weights = (self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias, self.norm.weight)
        eps = self.layer_norm_epsilon
        out = gdn_mixer(proj, *weights, dims=dims, cu_seqlens=starts, max_seqlen=length, eps=eps)
        return self.out_proj(out.view(batch, length, -1))

    return _replaced(layer_class, "forward", forward)


def tiny_model() -> nn.Module:
    """Three Gated DeltaNet layers and one of attention, random."""
    config = Qwen3_5TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3_5ForCausalLM(config).train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "conv1d" in name:
                p.normal_()  # transformers draws it so small that q and k would be the epsilon of their norm
    return model


def loss_and_gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    result = model(input_ids=tokens, labels=tokens, use_cache=False)
    result.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": result.logits.detach(), **found}


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative L2 difference, and of what."""
    assert got.keys() == want.keys()
    off = {name: ((got[name] - x).norm() / x.norm().clamp(min=1e-20)).item() for name, x in want.items()}
    name = max(off, key=lambda n: off[n])
    return off[name], name


def main() -> dict[str, float]:
    """-> the largest difference of each way from transformers' own."""
    torch.manual_seed(0)
    model = tiny_model()
    tokens = torch.randint(97, (2, 75))
    want = loss_and_gradients(model, tokens)
    found = {}
    for way in (our_rule, our_mixer):
        with way():
            found[way.__name__], name = worst(loss_and_gradients(model, tokens), want)
        print(f"{way.__name__:10} logits and {len(want) - 1} gradients: at most {found[way.__name__]:.1e} off ({name})")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors this small lose more to waiting threads than they gain
    main()
