"""Train your own PyTorch model with the head loss: any model that yields hidden rows [N, H] and has a head [V, H].

    python examples/custom_head_loss.py        # a few seconds on a CPU

A small student learns the next-token distribution of a fixed random teacher from its 16 most likely tokens. The logits
of the student exist only inside the loss, a bounded number of rows at a time. torch.compile(student_loss,
fullgraph=True) works as well.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cortiq_kernels.ops.library import head_topk_kl_loss, topk_softmax

VOCAB, HIDDEN, CONTEXT, TOPK, ROWS, STEPS = 512, 64, 2, 16, 256, 150


def lm(hidden: int) -> tuple[nn.Module, nn.Linear]:
    """The body, a bag of CONTEXT tokens -> a hidden row, and the head."""
    body = nn.Sequential(nn.EmbeddingBag(64, hidden), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
    return body, nn.Linear(hidden, VOCAB, bias=False)


def student_loss(body: nn.Module, head: nn.Linear, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Tensor:
    hidden = body(tokens)  # [N, H]
    row_weight = torch.full((ROWS,), 1 / ROWS)  # the mean over rows
    total, _ = head_topk_kl_loss(hidden, head.weight, topk_ids, topk_probs, row_weight)
    return total


def main() -> tuple[float, float]:
    """-> mean KL in nats of the first and of the last ten steps."""
    torch.manual_seed(0)
    teacher_body, teacher_head = lm(2 * HIDDEN)
    body, head = lm(HIDDEN)
    teacher_head.weight.data *= 20  # a random head says little; this one has opinions
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-2)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(64, (ROWS, CONTEXT))
        ids, probs, _, _ = topk_softmax(teacher_head(teacher_body(tokens)), TOPK)
        loss = student_loss(body, head, tokens, ids, probs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == STEPS - 1:
            print(f"step {step:3d}   KL {losses[-1]:.4f} nats")
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors this small lose more to waiting threads than they gain
    main()
