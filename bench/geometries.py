"""The sizes that are measured: four published ones, and a small one that a CPU runs in seconds.

The names are this benchmark's; users' sizes come from their own config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cortiq_kernels.model.geometry import Geometry

FULL, LINEAR = "full_attention", "linear_attention"
#: layers, hidden, MLP width, query heads, key/value heads, GDN value heads, tied head
PUBLISHED = {
    "0.8B": (24, 1024, 3584, 8, 2, 16, True),
    "4B": (32, 2560, 9216, 16, 4, 32, True),
    "9B": (32, 4096, 12288, 16, 4, 32, False),
    "27B": (64, 5120, 17408, 24, 4, 48, False),
}
SMALL = "small"
TOKENS = {SMALL: (256, 64)}  # tokens N and window of a measurement
TOKENS_PUBLISHED = (8192, 2048)


def geometry(name: str) -> Geometry:
    """The geometry called `name`: one of `PUBLISHED`, or "small"."""
    if name == SMALL:
        return Geometry(
            hidden=64, intermediate=(160,) * 4, vocab=1000, layer_types=_mixers(4), nq=4, nkv=2, hd=32, rot=8,
            rope_theta=1e7, nk=2, nv=4, dk=16, dv=16, conv=4, eps=1e-6, tied=True, max_position=4096, eos_ids=(0,),
        )  # fmt: skip
    if name not in PUBLISHED:
        raise ValueError(f"geometry: got {name!r}; expected one of {', '.join((SMALL, *PUBLISHED))}")
    layers, hidden, width, nq, nkv, nv, tied = PUBLISHED[name]
    return Geometry(
        hidden=hidden, intermediate=(width,) * layers, vocab=248320, layer_types=_mixers(layers), nq=nq, nkv=nkv,
        hd=256, rot=64, rope_theta=1e7, nk=16, nv=nv, dk=128, dv=128, conv=4, eps=1e-6, tied=tied,
        max_position=262144, eos_ids=(0,),
    )  # fmt: skip


def by_geometry(sizes: Callable[[Geometry], Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Shape name -> sizes for every geometry, with `n` tokens in windows of `window`; `sizes` may override both."""
    shapes = {}
    for name in (SMALL, *PUBLISHED):
        n, window = TOKENS.get(name, TOKENS_PUBLISHED)
        shapes[name] = {"n": n, "window": window, **sizes(geometry(name))}
    return shapes


def _mixers(layers: int) -> tuple[str, ...]:
    """Every fourth layer is full attention."""
    return tuple(FULL if i % 4 == 3 else LINEAR for i in range(layers))
