"""Model directories and weights: sizes (`geometry`), names (`names`), files (`hf`) and flat stores (`weights`).

A leaf of the package: it imports nothing from the ops, the data or the recipes.
"""

from cortiq_kernels.model.geometry import Geometry, ModelError
from cortiq_kernels.model.hf import (
    ModelDir,
    TensorInfo,
    WidthChange,
    Written,
    check_destination,
    create_model,
    open_model,
    width_changed_updates,
    write_model,
)
from cortiq_kernels.model.layout import Layout, Range, plan_layout
from cortiq_kernels.model.names import Slot, slots
from cortiq_kernels.model.weights import Trained, Weights, acc_dtype

__all__ = [
    "Geometry", "Layout", "ModelDir", "ModelError", "Range", "Slot", "TensorInfo", "Trained", "Weights",
    "WidthChange", "Written", "acc_dtype", "check_destination", "create_model", "open_model", "plan_layout", "slots",
    "width_changed_updates", "write_model",
]  # fmt: skip
