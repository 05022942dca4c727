"""What users of other kernels for gated MLPs, Grams and optimizers have reported, and the tests that hold ours to it: a
test that goes away takes its row with it, or this fails."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: report -> (what happened there, "file::test" of every test of it here)
REPORTS: dict[str, tuple[str, list[str]]] = {
    # gated MLPs and their products
    "MSLK#158": (
        "without rows, outputs are not written",
        [
            "ops/test_linear.py::test_no_rows_leave_the_sum_or_zero_it",
            "ops/test_swiglu.py::test_no_rows_have_no_sums",
            "interpret/test_swiglu_triton.py::test_no_rows",
        ],
    ),
    "Liger#1296": ("offsets of 32 bits", ["gpu/test_swiglu_gpu.py::test_elements_past_two_to_the_31"]),
    "Liger#272": (
        "a backward in place overwrites what somebody else still reads",
        [
            "ops/test_swiglu.py::test_buffers_may_be_the_inputs",
            "ops/test_swiglu.py::test_inputs_stay_untouched_and_second_run_is_bitwise_equal",
            "step/test_lane.py::test_late_products_change_no_bit",
        ],
    ),
    "quack#133": (
        "columns of an epilogue are doubled",
        ["interpret/test_swiglu_triton.py::test_columns_keep_their_places", "gpu/test_swiglu_gpu.py::test_every_width"],
    ),
    "quack: zero-stride gradients": (
        "an expanded gradient has strides of 0",
        [
            "ops/test_swiglu.py::test_strided_and_expanded",
            "gpu/test_swiglu_gpu.py::test_an_expanded_gradient_takes_the_torch_path",
        ],
    ),
    "DeepGEMM#237": ("one width works, another does not", ["gpu/test_swiglu_gpu.py::test_every_width"]),
    "FlagGems#5876": (
        "parts of a split product are added in 16 bit",
        [
            "gpu/test_swiglu_gpu.py::test_weight_gradients_are_not_summed_in_16_bit",
            "ops/test_linear.py::test_weight_gradient_never_rounds_to_16_bit",
        ],
    ),
    "triton#8424": (
        "atomics: other bits in every run",
        [
            "gpu/test_swiglu_gpu.py::test_sizes_of_a_step_and_the_same_bits_in_every_run",
            "gpu/test_adam_gpu.py::test_twenty_runs_are_bitwise_equal",
            "gpu/test_gram_gpu.py::test_twenty_runs_give_the_same_bits",
            "gpu/test_step_gpu.py::test_two_runs_are_bitwise_equal",
        ],
    ),
    # optimizers
    "pytorch#101449": ("more than 2^31 elements", ["gpu/test_adam_gpu.py::test_more_elements_than_32_bits_count"]),
    "apex#1728": (
        "a 16-bit weight without a master does not move",
        ["ops/test_adam.py::test_small_updates_move_the_master_and_in_time_the_plane"],
    ),
    "pytorch#95781": (
        "a refused step changes moments, or counts",
        [
            "ops/test_adam.py::test_refused_step_changes_no_bit",
            "ops/test_adam.py::test_bias_correction_counts_accepted_steps_only",
            "gpu/test_adam_gpu.py::test_a_refused_step_changes_no_bit",
            "gpu/test_graph_gpu.py::test_a_planted_inf_leaves_every_byte_in_a_replay",
        ],
    ),
    "pytorch#46849": (
        "a norm that overflows wipes out finite gradients",
        [
            "ops/test_adam.py::test_huge_gradients_are_clipped_not_refused",
            "gpu/test_adam_gpu.py::test_huge_gradients_are_clipped",
        ],
    ),
    "TorchSpec#150": ("one NaN poisons every master", ["step/test_update.py::test_planted_inf_leaves_every_byte"]),
    "OLMo-core#309": (
        "the optimizer waits for the device",
        [
            "gpu/test_step_gpu.py::test_no_hidden_synchronisation_and_no_new_memory",
            "gpu/test_graph_gpu.py::test_no_wait_and_no_new_memory_after_the_second_step",
            "gpu/test_adam_gpu.py::test_one_graph_serves_every_rate_without_a_wait",
        ],
    ),
    "DeepSpeed#1643": (
        "lengths and addresses that are no multiples",
        ["ops/test_adam.py::test_lengths_unaligned_slices_and_plane", "gpu/test_adam_gpu.py::test_ranges_and_slices"],
    ),
    # pruning
    "LLM-Pruner#13": (
        "NaN in float16 after pruning",
        ["gpu/test_step_gpu.py::test_a_cut_model_in_float16_trains"],
    ),
    "LLM-Shearing#74": (
        "the pruned shape is not the one asked for",
        ["recipes/test_masks.py::test_keep_masks", "recipes/test_masks.py::test_share_of_all"],
    ),
    "CoFiPruning#8": (
        "masks that are missing are dropped without a word",
        ["recipes/test_masks.py::test_files_that_are_no_masks_of_this_model"],
    ),
    "CoursIA#16192": (
        "Adam grows pruned weights back",
        [
            "ops/test_adam.py::test_hard_masked_weights_stay_zero_with_old_momentum_cleared",
            "step/test_compact.py::test_steps_and_evaluations_are_the_dense_ones",
        ],
    ),
    "vLLM#31454": (
        "a runtime wants one width for all layers",
        ["recipes/test_masks.py::test_keep_widths_uniform", "model/test_hf_write.py::test_uniform_narrowing_and_mtp"],
    ),
    "a gate near 1 in bfloat16": (
        "s is 1, and s (1 - s) is 0: the gate stops",
        ["ops/test_swiglu.py::test_mask_gradient_of_a_nearly_open_gate"],
    ),
    # Grams
    "llm-compressor#1069": (
        "a Gram that is not positive definite",
        [
            "recipes/test_repair.py::test_a_gram_that_rounding_made_indefinite",
            "recipes/test_repair.py::test_fewer_rows_than_neurons",
            "recipes/test_repair.py::test_copies_among_those_that_stay",
        ],
    ),
    "GPTQModel#1469": (
        "a NaN among the tokens",
        [
            "test_native_gram.py::test_what_is_not_finite_is_said_and_can_be_kept_out",
            "gpu/test_gram_gpu.py::test_what_is_not_finite_can_be_kept_out",
        ],
    ),
    "GPTQModel#1376": ("no tokens at all", ["ops/test_gram.py::test_nothing_to_add_and_bad_values"]),
    "keras#23512": (
        "nothing was captured, and nothing said so",
        ["recipes/test_capture.py::test_dead_layers_and_values_that_are_not_finite"],
    ),
    "Model-Optimizer#1261": (
        "padding enters the statistics",
        [
            "recipes/test_capture.py::test_padding_never_enters",
            "gpu/test_gram_gpu.py::test_rows_that_do_not_count_are_never_seen",
        ],
    ),
    "GPTQModel#2805": (
        "a temporary as large as the Gram",
        [
            "ops/test_gram.py::test_no_temporary_of_the_size_of_the_matrix",
            "gpu/test_gram_gpu.py::test_no_temporary_of_the_size_of_the_matrix",
        ],
    ),
    "OpenBLAS#5873": ("a wrong symmetric product", ["test_native_gram.py::test_odd_widths"]),
}


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_has_its_tests(report):
    for place in REPORTS[report][1]:
        file, name = place.split("::")
        tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
        assert any(isinstance(n, ast.FunctionDef) and n.name == name for n in tree.body), f"{place} is gone"
