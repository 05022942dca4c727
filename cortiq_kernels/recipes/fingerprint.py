"""Whether two model directories hold the same model, without reading all of it."""

from __future__ import annotations

import hashlib

from cortiq_kernels.model.hf import ModelDir

_SAMPLE = 4096


def fingerprint(model: ModelDir) -> str:
    """sha256 over the geometry and, of every tensor, its name, dtype, shape and up to 3 * 4 KiB of its bytes: from the
    start, the middle and the end.

    Two models that differ in any way that training, folding or rounding makes them differ have other fingerprints;
    paths, dates and the split into shards do not matter. Reads 12 KiB a tensor.
    """
    h = hashlib.sha256(repr(model.geometry).encode())
    for name in sorted(model.tensors):
        t = model.tensors[name]
        h.update(f"{name} {t.dtype} {t.shape}\n".encode())
        with open(model.path / t.file, "rb", buffering=0) as f:
            start = model.shards[t.file].data_start + t.start
            for at in (0, (t.nbytes - _SAMPLE) // 2, t.nbytes - _SAMPLE):
                f.seek(start + max(at, 0))
                h.update(f.read(min(_SAMPLE, t.nbytes)))
    return h.hexdigest()
