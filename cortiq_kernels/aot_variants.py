"""The kernels that the ops launch, as variants to compile ahead of time (aot.py): argument types, constexprs, warps."""

from __future__ import annotations

from typing import Any, NamedTuple


class Variant(NamedTuple):
    """One kernel with the types of its run-time arguments, its constexprs and its warps."""

    name: str
    kernel: Any
    types: dict[str, str]
    constexprs: dict[str, Any]
    warps: int
    stages: int = 3
    maxnreg: int = 0  # registers a thread; 0 for as many as it likes
    aligned: tuple[str, ...] = ()  # arguments that are multiples of 16


def variants(arch: int) -> list[Variant]:
    """Every variant that the ops launch on sm_<arch>, up to sizes."""
    made = head_variants() + swiglu_variants(arch) + gated_delta_variants(arch) + attention_variants(arch)
    return made + adam_variants(arch) + norm_variants(arch) + rows_variants(arch) + parts_variants()


def head_variants() -> list[Variant]:
    """The head's loss and the top-k."""
    from cortiq_kernels.ops import topk_kl_triton as kl
    from cortiq_kernels.ops import topk_triton as top

    out = []
    modes = {"forward": kl.FORWARD.value, "ratio": kl.RATIO.value, "scaled": kl.SCALED.value}
    cases = [("bf16", m, 64, False, False) for m in modes]
    cases += [
        ("bf16", "ratio", 16, False, False),
        ("bf16", "ratio", 256, False, False),
        ("fp16", "scaled", 64, False, False),
    ]
    cases += [
        ("fp32", "ratio", 64, False, False),
        ("bf16", "ratio", 64, True, False),
        ("bf16", "scaled", 64, True, True),
    ]
    for z, mode, k_pad, cap, tail in cases:
        out.append(
            Variant(
                f"head_kl {z} {mode} k{k_pad}" + (" softcap" if cap else "") + (" tail" if tail else ""),
                kl.head_kl_kernel,
                {
                    "z_ptr": "*" + z, "ids_ptr": "*i32", "probs_ptr": "*fp32", "weight_ptr": "*fp32",
                    "scale_ptr": "*fp64", "loss_ptr": "*fp32", "ratio_ptr": "*fp32", "vocab": "i32", "k": "i32",
                    "z_stride": "i32", "ids_stride": "i32", "probs_stride": "i32", "inv_temperature": "fp32",
                    "softcap": "fp32",
                },
                {"MODE": modes[mode], "SOFTCAP": cap, "TAIL": tail, "K_PAD": k_pad, "BLOCK": kl.BLOCK},
                kl.WARPS,
            )
        )  # fmt: skip
    for z, bits in (("bf16", 16), ("fp32", 32)):
        types = {"z_ptr": "*" + z, "tile_ptr": "*fp32", "lse_ptr": "*fp32", "mass_ptr": "*fp32"}
        types |= {"vocab": "i32", "z_stride": "i32"}
        shape = {"WITH_LSE": True, "TILES": 1024, "TILE": top.TILE}
        group, warps = top.SWEEP
        out.append(Variant(f"topk sweep {z}", top.sweep_kernel, types, shape | {"GROUP": group}, warps))
        group, warps = top.SELECT
        for sort in (128, 512):
            types = {
                "z_ptr": "*" + z, "ids_ptr": "*i32", "probs_ptr": "*fp32", "lse_ptr": "*fp32", "mass_ptr": "*fp32",
                "tile_ptr": "*fp32", "list_ptr": "*i32", "found_ptr": "*i32", "vocab": "i32", "k": "i32",
                "z_stride": "i32",
            }  # fmt: skip
            made = {"BITS": bits, "WITH_LSE": True, "TILES": 1024, "SORT": sort, "TILE": top.TILE, "GROUP": group}
            out.append(Variant(f"topk select {z} sort {sort}", top.select_kernel, types, made, warps))
    return out


def swiglu_variants(arch: int) -> list[Variant]:
    """The gated MLP activation: with a mask and sums, as learned masks take it, and without, as healing does."""
    from cortiq_kernels.ops import configs
    from cortiq_kernels.ops import swiglu_triton as swiglu

    out = []
    sums = ("mask_ptr", "counted_ptr", "abs_ptr", "square_ptr", "dmask_ptr")
    for dtype, bits in (("bf16", 16), ("fp16", 16), ("fp32", 32)):
        for kernel, name in ((swiglu.fwd_kernel, "fwd"), (swiglu.bwd_kernel, "bwd"), (swiglu.sum_kernel, "sum")):
            for full in (True, False) if name != "sum" else (True,):
                chosen = "fwd_sums" if full and name == "fwd" else name
                launch = dict(configs.launch("swiglu", bits, chosen, arch))
                warps, stages = launch.pop("num_warps"), launch.pop("num_stages")
                made = launch | ({} if full else {n: None for n in kernel.arg_names if n in sums})
                made |= {"mask_stride": 1, "out_stride": 1, "product_stride": 1, "ADD": True}
                made = {n: v for n, v in made.items() if n in kernel.arg_names}
                types = _types(kernel, dtype, made)
                types |= {n: t for n, t in {"counted_ptr": "*i1", "out_ptr": "*fp32"}.items() if n in types}
                aligned = tuple(n for n, t in types.items() if t[0] == "*" or n == "f" or "stride" in n)
                label = f"swiglu {name} {dtype}" + (" masked" if full and name != "sum" else "")
                if (name, dtype) != ("sum", "fp16"):  # its tensors are float32; as for bf16
                    out.append(Variant(label, kernel, types, made, warps, stages, aligned=aligned))
    return out


# (working dtype, key heads, value heads a key head, key size, value size)
_HEADS = [
    ("bf16", 16, 1, 128, 128),
    ("bf16", 16, 2, 128, 128),
    ("fp16", 4, 3, 64, 64),
    ("bf16", 2, 2, 100, 60),
]


def gated_delta_variants(arch: int) -> list[Variant]:
    """The gated delta rule and its mixer."""
    from cortiq_kernels.ops import configs
    from cortiq_kernels.ops.gated_delta import (
        bwd_triton,
        chunks_triton,
        conv_triton,
        fwd_triton,
        gates_triton,
        norm_triton,
        triton_run,
        wy_triton,
    )

    types = {n: "*i32" for n in ("cu_ptr", "table_ptr", "offsets_ptr")} | {"sequences": "i32", "capacity": "i32"}
    index = chunks_triton.chunk_index_kernel
    out = [Variant("gdn chunk_index", index, types, {"ROWS": chunks_triton.ROWS, "BLOCK": chunks_triton.BLOCK}, 4)]
    for dtype, hk, group, dk, dv in _HEADS:
        kpad, vpad = triton_run.padded(dk), triton_run.padded(dv)
        hv, size = hk * group, max(kpad, vpad)
        heads = {"HV": hv, "GROUP": group, "DK": dk, "DV": dv}
        mixer = dk == dv
        chosen: list[tuple[Any, str, dict[str, Any]]] = [
            (
                wy_triton.wy_kernel,
                "wy",
                {"HK": hk, "GROUP": group, "DK": dk, "KPAD": kpad, "RAW": mixer, "TINY": 1e-30},
            ),
            (
                fwd_triton.state_kernel,
                "state",
                {**heads, "KPAD": kpad, "HAS_H0": not mixer, "HAS_HT": not mixer},
            ),
            (fwd_triton.output_kernel, "output", {**heads, "KPAD": kpad, "VPAD": vpad, "NORM": mixer, "KEEP": mixer}),
            (
                bwd_triton.dstate_kernel,
                "dstate",
                {**heads, "KPAD": kpad, "HAS_DHT": not mixer, "HAS_DH0": not mixer},
            ),
            (bwd_triton.input_kernel, "input", {**heads, "VPAD": vpad}),
        ]
        if mixer:
            span = {"HEADS": 2 * hk + hv, "D": dk, "PAD": triton_run.power(dk), "W": 4}
            norm = {"HV": hv, "DV": dv, "PAD": triton_run.power(dv), "WRITE_OUT": True}
            chosen += [
                (conv_triton.conv_kernel, "conv", span),
                (conv_triton.conv_bwd_kernel, "conv_bwd", span),
                (norm_triton.gated_norm_bwd_kernel, "norm_bwd", norm),
                (fwd_triton.advance_kernel, "advance", {**heads, "KPAD": kpad}),
            ]
        gate_shape = {"HV": hv, "PAD": triton_run.power(hv), "RAW": mixer, "PARTS": -(-dk // 64)}
        chosen.append((gates_triton.gates_bwd_kernel, "gates_bwd", gate_shape))
        for kernel, name, constexprs in chosen:
            launch = dict(configs.launch("gated_delta", size, name, arch))
            if "BV" in launch:
                launch["BV"] = triton_run.block(launch["BV"], dv)  # as triton_run cuts it
            warps, stages, most = launch.pop("num_warps"), launch.pop("num_stages"), launch.pop("maxnreg", 0)
            types = _types(kernel, dtype, constexprs | launch)
            aligned = _aligned(types)
            label = f"gdn {name} {dtype} {hk}/{hv} {dk}x{dv}"
            out.append(Variant(label, kernel, types, constexprs | launch, warps, stages, most, aligned))
    return out


def norm_variants(arch: int) -> list[Variant]:
    """Residual add and RMS norm."""
    from cortiq_kernels.ops import rms_norm_triton as norm

    out = []
    for dtype, h in (("bf16", 1024), ("bf16", 2560), ("bf16", 5120), ("fp16", 64), ("fp32", 1025), ("bf16", 16384)):
        shared = {"H": h, "ZERO_CENTERED": True}
        flags: list[tuple[Any, str, dict[str, Any]]] = [
            (norm.norm_kernel, "fwd", {**shared, "ADD": True, "WRITE_SUM": True}),
            (norm.norm_bwd_kernel, "bwd", {**shared, "ADD": True, "AGAIN": True, "WEIGHT": True}),
        ]
        if h == 1024:
            flags += [
                (norm.norm_kernel, "fwd again", {**shared, "ADD": False, "WRITE_SUM": False}),
                (norm.norm_bwd_kernel, "bwd final", {**shared, "ADD": False, "AGAIN": False, "WEIGHT": True}),
                (norm.norm_bwd_kernel, "bwd frozen", {**shared, "ADD": True, "AGAIN": False, "WEIGHT": False}),
            ]
        for kernel, name, constexprs in flags:
            launch = norm.shape_of(h, name.split()[0], arch)
            launch.pop("PROGRAMS", None)
            warps, stages = launch.pop("num_warps"), launch.pop("num_stages")
            types = _types(kernel, dtype, constexprs | launch)
            aligned = tuple(n for n, t in types.items() if t[0] == "*" or ("stride" in n and h % 16 == 0))
            out.append(
                Variant(f"norm {name} {dtype} {h}", kernel, types, constexprs | launch, warps, stages, 0, aligned)
            )
    return out


def rows_variants(arch: int) -> list[Variant]:
    """Rows moved by an index: what the head reads and writes, and the embedding's gradient."""
    from cortiq_kernels.ops import rows_triton as rows

    out = []
    for dtype, h in (("bf16", 1024), ("bf16", 2560), ("fp16", 64), ("fp32", 33)):
        for kernel, name, constexprs in (
            (rows.gather_kernel, "gather", {"H": h, "INDEXED": True}),
            (rows.scatter_kernel, "scatter", {"H": h, "SCALE": True}),
            (rows.sum_kernel, "sum", {"H": h, "ADD": True}),
        ):
            launch = rows.shape_of(h, name, arch)
            warps, stages = launch.pop("num_warps"), launch.pop("num_stages")
            types = _types(kernel, dtype, constexprs | launch)
            if name == "scatter":
                types["rows_ptr"] = "*fp32"
            if name == "sum":
                types["out_ptr"] = "*fp32"
            aligned = tuple(n for n, t in types.items() if t[0] == "*" or ("stride" in n and h % 16 == 0))
            out.append(
                Variant(f"rows {name} {dtype} {h}", kernel, types, constexprs | launch, warps, stages, 0, aligned)
            )
    return out


def parts_variants() -> list[Variant]:
    """Sums of a small gradient's parts."""
    from cortiq_kernels.ops import parts_triton

    out = []
    for parts, width in ((528, 1024), (2112, 128), (64, 24576)):
        made: dict[str, Any] = {"ADD": True, **parts_triton.shape_of(parts, width)}
        warps = made.pop("num_warps")
        types = {"part_ptr": "*fp32", "out_ptr": "*fp32", "parts": "i32", "width": "i32", "stride": "i32"}
        aligned = ("part_ptr", "out_ptr", "width", "stride")
        out.append(
            Variant(f"parts {parts} of {width}", parts_triton.parts_kernel, types, made, warps, aligned=aligned)
        )
    return out


def adam_variants(arch: int) -> list[Variant]:
    """The update of flat memory: the default hyperparameters, a bf16 and an f16 plane, f32 and f64 moments."""
    from cortiq_kernels.ops import adam_triton, configs

    tables = {"tiles_ptr": "*i32", "table_ptr": "*i64", "ranges": "i32"}
    out = []
    for moments, plane in (("fp32", "bf16"), ("fp32", "fp16"), ("fp64", "")):
        size, ranges = int(moments[2:]), {"ALIGNED": True, "R_PAD": 16}
        chosen: list[tuple[Any, str, dict[str, str], dict[str, Any]]] = [
            (
                adam_triton.adam_norm_kernel,
                "norm",
                {"grad_ptr": "*fp32", "parts_ptr": "*fp64", **tables},
                {**ranges, "TILE": adam_triton.TILE},
            ),
            (
                adam_triton.adam_decide_kernel,
                "decide",
                {f"{n}_ptr": "*fp64" for n in ("parts", "loss", "rate", "factor", "plan", "norm")}
                | {"ok_ptr": "*u8", "step_ptr": "*i64", "skipped_ptr": "*i64", "in_row_ptr": "*i64"}
                | {"scale_ptr": "*fp32", "parts": "i32", "ranges": "i32"},
                {"HAS_LOSS": True, "CLIP": 1.0, "LOG1": -0.105, "LOG2": -0.001, "DECAY": 0.0, "R_PAD": 16},
            ),
            (
                adam_triton.adam_update_kernel,
                "update",
                {"param_ptr": "*fp32", "grad_ptr": "*fp32", "m_ptr": "*" + moments, "v_ptr": "*" + moments}
                | {"plane_ptr": "*" + (plane or "fp32"), "plan_ptr": "*fp64", "ok_ptr": "*u8", **tables},
                {**ranges, "BETA1": 0.9, "BETA2": 0.999, "REST1": 0.1, "REST2": 0.001, "EPS": 1e-8}
                | {"HAS_PLANE": bool(plane)},
            ),
        ]
        for kernel, name, types, constexprs in chosen:
            if plane == "fp16" and name != "update":
                continue  # the same kernel
            launch = dict(configs.launch("adam", size, name, arch))
            warps, stages = launch.pop("num_warps"), launch.pop("num_stages")
            aligned = tuple(n for n, t in types.items() if t[0] == "*" and n != "ok_ptr")
            label = f"adam {name} {moments}" + (f" {plane}" if name == "update" and plane else "")
            out.append(Variant(label, kernel, types, constexprs | launch, warps, stages, aligned=aligned))
    return out


# (working dtype, query heads, key heads, head size, rotary dimensions, gate, norm, bias): Qwen3.5, Qwen3, Qwen2
_ATTENTION = [
    ("bf16", 8, 2, 256, 64, True, True, False),
    ("bf16", 16, 8, 128, 128, False, True, False),
    ("fp16", 14, 2, 64, 64, False, False, True),
]


def attention_variants(arch: int) -> list[Variant]:
    """The attention mixer."""
    from cortiq_kernels.ops import configs
    from cortiq_kernels.ops.attention import gate_triton, prep_triton, softmax_bwd_triton, softmax_triton
    from cortiq_kernels.ops.attention.dims import AttnDims, pack, tile_width
    from cortiq_kernels.ops.attention.triton_run import power

    out = []
    for dtype, nq, nkv, hd, rot, gate, norm, bias in _ATTENTION:
        dims = AttnDims(nq, nkv, hd, rot, gate)
        rows = {"HD": hd, "PAD": power(hd)}
        prep = {"NQ": nq, "NKV": nkv, **rows, "ROT": rot, "NORM": norm, "CENTERED": gate, "BIAS": bias}
        tile = {"NKV": nkv, "GROUP": dims.group, "HD": hd, "PAD": tile_width(hd), "PACK": pack(dims)}
        chosen: list[tuple[Any, str, dict[str, Any]]] = [
            (prep_triton.attn_prep_kernel, "prep", prep),
            (prep_triton.attn_prep_bwd_kernel, "prep_bwd", {**prep, "VALUES": bias}),
            (softmax_triton.attn_fwd_kernel, "softmax", {**tile, "GATE": gate, "SAVE": True}),
            (softmax_bwd_triton.attn_bwd_kernel, "softmax_bwd", tile),
            (gate_triton.attn_gate_bwd_kernel, "gate_bwd", {"NQ": nq, **rows, "GATE": gate, "DELTA": True}),
        ]
        if gate:
            chosen.append((gate_triton.attn_gate_kernel, "gate", {"NQ": nq, **rows}))
        for kernel, name, constexprs in chosen:
            launch = dict(configs.launch("attention", tile_width(hd), name, arch))
            warps, stages, most = launch.pop("num_warps"), launch.pop("num_stages"), launch.pop("maxnreg", 0)
            types = _types(kernel, dtype, constexprs | launch)
            aligned = _aligned(types)
            label = f"attention {name} {dtype} {nq}/{nkv} {hd}"
            out.append(Variant(label, kernel, types, constexprs | launch, warps, stages, most, aligned))
    return out


def _aligned(types: dict[str, str]) -> tuple[str, ...]:
    """Arguments that are multiples of 16 in the models' shapes."""
    ends = ("_head", "_apart", "_start")
    named = ("start", "channels")
    return tuple(n for n, t in types.items() if t[0] == "*" or "stride" in n or n.endswith(ends) or n in named)


_F32 = {
    "a_log_ptr",
    "beta_ptr",
    "dbeta_ptr",
    "dg_ptr",
    "dgs_ptr",
    "dh0_ptr",
    "dht_ptr",
    "dnorm_ptr",
    "dt_ptr",
    "dw_ptr",
    "factor_ptr",
}
_F32 |= {"g_ptr", "h0_ptr", "ht_ptr", "norm_ptr", "part_ptr", "rstd_ptr", "w_ptr", "weight_ptr"}
_F32 |= {"mask_ptr", "dmask_ptr", "abs_ptr", "square_ptr", "product_ptr"}  # of swiglu's sums
_INT = {"table_ptr": "*i32", "cu_ptr": "*i32", "offsets_ptr": "*i32", "pos_ptr": "*i64"}
_INT |= {"ids_ptr": "*i32", "index_ptr": "*i32", "order_ptr": "*i64"}
_F32 |= {"bias_ptr", "cos_ptr", "dbias_ptr", "delta_ptr", "k_norm_ptr", "lse_ptr", "q_norm_ptr", "sin_ptr"}
_INT |= {"blocks_ptr": "*i32", "keys_ptr": "*i32", "queries_ptr": "*i32"}


def _types(kernel: Any, dtype: str, constexprs: dict[str, Any]) -> dict[str, str]:
    """Types of a kernel's run-time arguments, by their names."""
    types = {}
    for name in kernel.arg_names:
        if name in constexprs:
            continue
        if name.endswith("_ptr"):
            types[name] = _INT.get(name) or ("*fp32" if name in _F32 else "*" + dtype)
        else:
            types[name] = "fp32" if name in ("scale", "eps") else "i32"
    return types
