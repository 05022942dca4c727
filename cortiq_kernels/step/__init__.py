"""The explicit training step: buffers, forward, loss, backward (forward reversed), update. No autograd, no nn.Module.

    embed
    L times: add+norm -> in_proj -> mixer -> out_proj -> add+norm -> gate_up -> SwiGLU -> down
    add+norm -> head and loss

`forward.py` and `backward.py` list the same calls in opposite order over the buffers of `buffers.py`; `loss.py` is the
one call that turns hidden states into a loss and their gradient; `update.py` is Adam over flat memory; `train.py`
strings them together for micro-batches, and for evaluation; `graph.py` records and replays what it strings together,
on the inputs that `inputs.py` brings to the device and keeps in place; `gates.py` trains a gate per MLP neuron on the
same calls.
"""

from cortiq_kernels.step.buffers import POLICIES, Buffers, Policy
from cortiq_kernels.step.gates import GateTrainer
from cortiq_kernels.step.inputs import Micro
from cortiq_kernels.step.train import Evaluator, StepStats, Trainer

__all__ = ["POLICIES", "Buffers", "Evaluator", "GateTrainer", "Micro", "Policy", "StepStats", "Trainer"]
