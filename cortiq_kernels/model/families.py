"""The model families whose layers this package computes, and what sets each apart; sizes come from a model's own file.

| | Qwen3.5 | Qwen3 | Qwen2 | Llama |
|---|---|---|---|---|
| `model_type` | `qwen3_5_text`, or `qwen3_5` with `text_config` | `qwen3` | `qwen2` | `llama` |
| mixers | Gated DeltaNet and full attention | full attention | full attention | full attention |
| RMSNorm | x̂·(1 + w) | x̂·w | x̂·w | x̂·w |
| norm of q and k | yes | yes | no | no |
| output gate σ(gate) | yes | no | no | no |
| bias of q, k and v | no | no | yes | no |
| `head_dim` when absent | 256 | 128 | H / heads | H / heads |
| RoPE | on a part of the head (0.25) | whole head | whole head | whole head |

Everything else is one and the same: SwiGLU, pre-norm residual stream, causal GQA, and the names of the tensors.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Family:
    """One column of the table in the module docstring.

    `hybrid`: layers may be Gated DeltaNet, and the rotary share of a head is a setting. `head_dim` None: H / heads.
    """

    name: str
    hybrid: bool
    zero_centered: bool
    qk_norm: bool
    attn_gate: bool
    qkv_bias: bool
    head_dim: int | None


QWEN3_5 = Family("Qwen3.5", True, True, True, True, False, 256)
QWEN3 = Family("Qwen3", False, False, True, False, False, 128)
QWEN2 = Family("Qwen2", False, False, False, False, True, None)
LLAMA = Family("Llama", False, False, False, False, False, None)

#: by the `model_type` of a flat config.json
FLAT = {"qwen3_5_text": QWEN3_5, "qwen3": QWEN3, "qwen2": QWEN2, "llama": LLAMA}
#: by the `model_type` at the root of a config.json that keeps the text model under `text_config`
NESTED = {"qwen3_5": QWEN3_5}
#: for messages
SUPPORTED = f"{', '.join(FLAT)}, or qwen3_5 with text_config; dense"
NAMES = "Qwen3.5, Qwen3, Qwen2 or Llama"
