"""Records in files -> tokens -> windows -> batches.

    record.py     one example; FNV-1a-64 and the split that it gives
    files.py      rows of a JSONL or parquet file
    examples.py   one row, checked
    template.py   chat templates, and where the reply starts in what they render
    tokens.py     tokenizer.json and the special tokens of a model directory
    encode.py     examples -> ids and the first scored token
    records.py    a file of records -> Dataset, checked as a whole
    windows.py    packing into windows
    batches.py    batches of windows, for training, evaluation and scores
    order.py      the order of the train batches, pass after pass

Nothing here knows about models, operators or devices; batches are CPU tensors that `Batch.to` moves.
"""

from cortiq_kernels.data.batches import Batch, Batches, eval_batches, make_batch, score_batches, train_batches
from cortiq_kernels.data.order import HEAL_SEED, MASKS_SEED, Shuffler
from cortiq_kernels.data.record import SPLITS, DataError, Record, fnv1a64, split_of
from cortiq_kernels.data.records import Dataset, load_records
from cortiq_kernels.data.template import ChatTemplate, TemplateFailure
from cortiq_kernels.data.tokens import Tokenizer
from cortiq_kernels.data.windows import PACKINGS, Packed, Window, filler_window, pack

__all__ = [
    "HEAL_SEED",
    "MASKS_SEED",
    "PACKINGS",
    "SPLITS",
    "Batch",
    "Batches",
    "ChatTemplate",
    "DataError",
    "Dataset",
    "Packed",
    "Record",
    "Shuffler",
    "TemplateFailure",
    "Tokenizer",
    "Window",
    "eval_batches",
    "filler_window",
    "fnv1a64",
    "load_records",
    "make_batch",
    "pack",
    "score_batches",
    "split_of",
    "train_batches",
]
