"""Hugging Face model directories in and out: `open_model`, `write_model`, `create_model`.

Reading and its checks are in `hf_read`, writing in `hf_write`, the file format in `shard`, and where output may go in
`destination`; this module gathers what callers use.
"""

from cortiq_kernels.model.destination import check_destination
from cortiq_kernels.model.geometry import ModelError
from cortiq_kernels.model.hf_read import ModelDir, open_model
from cortiq_kernels.model.hf_write import WidthChange, Written, create_model, width_changed_updates, write_model
from cortiq_kernels.model.shard import TensorInfo

__all__ = [
    "ModelDir", "ModelError", "TensorInfo", "WidthChange", "Written",
    "check_destination", "create_model", "open_model", "width_changed_updates", "write_model",
]  # fmt: skip
