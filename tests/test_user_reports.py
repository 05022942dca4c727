"""The public reports that this package is held to, and the tests of each: what users of such packages ran into. A test
exists here by name and names its report, so that neither is lost without the other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODELS, DATA, FILES = "test_user_reports_models.py", "test_user_reports_data.py", "test_user_reports_files.py"
RUNS, INSTALL = "test_user_reports_runs.py", "test_user_reports_install.py"
RESUME = "recipes/test_resume.py"

#: report -> "file::test" of every test of it
REPORTS: dict[str, list[str]] = {
    # model directories
    "pegainfer-project/pegainfer#544": [
        f"{MODELS}::test_untied_head_is_used",
        f"{MODELS}::test_tie_flags_that_disagree",
    ],
    "NVIDIA-NeMo/Automodel#2484": [f"{MODELS}::test_float32_decay_is_never_rounded"],
    "unslothai/unsloth#11042": [f"{MODELS}::test_declared_mtp_and_its_tensors_agree_after_a_fold"],
    "meta-pytorch/torchtune#2669": [f"{MODELS}::test_tied_checkpoint_that_ships_its_head"],
    "vllm-project/vllm#42624": [f"{MODELS}::test_rope_theta_wherever_it_is"],
    "ggml-org/llama.cpp#28207": [f"{MODELS}::test_layer_types_that_follow_no_interval"],
    "alibaba/MNN#4686": [f"{MODELS}::test_flat_and_nested_are_one_model"],
    "sgl-project/sglang#32279": [f"{FILES}::test_missing_shard"],
    "mflux-community/mflux#603": [f"{FILES}::test_older_output_is_not_mixed_with"],
    "huggingface/transformers#34919": [f"{MODELS}::test_dtype_entries_mean_nothing"],
    # tokens and templates
    "verl-project/verl#7725": [f"{DATA}::test_what_the_template_refuses"],
    "marin-community/marin#7237": [
        f"{DATA}::test_reply_is_what_is_scored",
        f"{DATA}::test_nothing_scored_and_rewritten_replies_are_refused",
    ],
    "huggingface/trl#5213": [
        f"{DATA}::test_reply_is_what_is_scored",
        f"{DATA}::test_nothing_scored_and_rewritten_replies_are_refused",
    ],
    "huggingface/transformers#47853": [f"{DATA}::test_control_tokens_in_user_text"],
    "infiniflow/ragflow#19179": [f"{DATA}::test_bom_crlf_and_no_final_newline"],
    "bytedance/deer-flow#5423": [f"{DATA}::test_unicode_line_separators_split_nothing"],
    # data and packing
    "huggingface/trl#6668": [f"{DATA}::test_unscored_records_are_counted_and_never_a_loss_of_zero"],
    "MakazhanAlpamys/Soup#680": [f"{DATA}::test_validation_records_that_are_in_train"],
    "radixark/miles#2213": [f"{DATA}::test_each_packed_record_is_itself_alone"],
    # training loop
    "modelscope/ms-swift#10050": [
        f"{RESUME}::test_order_of_the_second_pass_goes_on",
        "data/test_order.py::test_resume_inside_the_second_pass_continues_it",
    ],
    "ml-explore/mlx-lm#1413": [f"{DATA}::test_micro_batches_count_by_their_weight_and_the_tail_is_used"],
    "goodfire-ai/spd#741": [f"{RUNS}::test_signals_are_honoured_in_every_phase"],
    "TensorAuto/OpenTau#184": [f"{RESUME}::test_f32_state_and_f16_scale_go_on"],
    "mlfoundations/open_lm#154": [
        f"{RUNS}::test_full_disk_is_found_at_the_start",
        f"{RUNS}::test_full_disk_while_writing_keeps_the_previous_output",
    ],
    "tqdm/tqdm#1342": [f"{RUNS}::test_redirected_progress_is_plain_and_short"],
    # pruning and scores
    "huggingface/transformers#30975": [f"{DATA}::test_no_target_is_lost_at_a_window_edge"],
    "huggingface/transformers#39241": [f"{DATA}::test_losses_do_not_depend_on_the_batch"],
    "microsoft/TransformerCompression#179": [f"{MODELS}::test_odd_width_is_warned_about_and_speed_is_measured"],
    # install and devices
    "triton-lang/triton#6150": [f"{RUNS}::test_ops_import_on_a_machine_with_triton_and_no_gpu"],
    "foundation-model-stack/fms-hf-tuning#367": [
        f"{INSTALL}::test_a_home_that_cannot_be_written_to",
        f"{INSTALL}::test_a_home_that_can_be_written_to",
    ],
    "triton-lang/triton#2441": [
        f"{RUNS}::test_asking_for_a_gpu_without_one",
        "gpu/test_second_gpu.py::test_top_k",
        "gpu/test_second_gpu.py::test_head_and_loss",
        "gpu/test_second_gpu.py::test_training_steps",
    ],
    "NVIDIA/apex#1633": [f"{INSTALL}::test_building_where_nvcc_is_missing_or_odd"],
    # safetensors and files
    "safetensors/safetensors#782": [f"{FILES}::test_ordinary_permissions"],
    "bghira/SimpleTuner#2714": [f"{FILES}::test_output_is_never_the_source"],
    "huggingface/transformers#27923": [f"{FILES}::test_damaged_shard", f"{FILES}::test_damaged_other_files"],
    "keiretsu-labs/kubernetes-manifests#2517": [f"{FILES}::test_hub_cache_snapshot_as_input"],
    "safetensors/safetensors#469": [
        f"{FILES}::test_views_are_written_as_their_values",
        "model/test_hf_write.py::test_views_of_any_strides",
    ],
}


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_has_its_tests(report):
    for place in REPORTS[report]:
        file, name = place.split("::")
        text = (HERE / file).read_text(encoding="utf-8")
        tree = ast.parse(text)
        found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
        assert len(found) == 1, f"{place} is gone"
        said = (ast.get_docstring(found[0]) or "") + (ast.get_docstring(tree) or "")
        short = report.split("/")[1]
        assert short in said.replace("\n", " "), f"{place} does not name {report}"
