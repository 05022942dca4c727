"""A tiny model directory: byte-level BPE trained here, ChatML control tokens, and a Qwen3.5-like template."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

# The rules that users meet in the Qwen3.5 template: system first and once, a user query somewhere, a think block that
# the generation prefix opens and the reply closes.
QWEN_LIKE = """
{%- if not messages %}
    {{- raise_exception('No messages provided.') }}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last_query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if ns.last_query < 0 %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content | default('') | trim %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content | default('') | trim %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] | trim %}
            {%- set content = content.split('</think>')[-1] | trim %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query %}
            {%- set content = '<think>\\n' + reasoning + '\\n</think>\\n\\n' + content %}
        {%- endif %}
        {%- for call in message.tool_calls | default([]) %}
            {%- set content = content + '<tool_call>' + (call.function | tojson) %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}
"""

CHATML = """{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

CORPUS = [
    "the quick brown fox jumps over the lazy dog\n\n",
    "user assistant system reply think\n\nthe answer is forty two\n\n",
    "What is the answer? The answer is 42.\n\n" * 4,
]


def build_tokenizer(*, trim_offsets: bool = False) -> tokenizers.Tokenizer:
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1
    )
    tok.train_from_iterator(CORPUS, trainer)
    tok.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    return tok


def write_model_dir(path: Path, *, template: str | None = QWEN_LIKE, trim_offsets: bool = False) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tok = build_tokenizer(trim_offsets=trim_offsets)
    tok.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    # no model_type: for a known one transformers replaces tokenizer.json's pre-tokenizer with its own
    (path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": tok.token_to_id("<|endoftext|>")}}))
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tok.token_to_id("<|im_end|>"), tok.token_to_id("<|endoftext|>")]})
    )
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def local() -> SimpleNamespace:
    """The builders and templates of this file, for tests that vary them."""
    return SimpleNamespace(write_model_dir=write_model_dir, QWEN_LIKE=QWEN_LIKE, CHATML=CHATML)
