"""The tokenizer of a model directory: tokenizer.json, the special tokens, and the chat template.

Text is encoded with what tokenizer.json adds around it (a BOS, say); a rendered conversation is encoded without,
since the template writes its own. Truncation and padding that a tokenizer.json may carry are switched off. Control
tokens inside text (`<|im_end|>` in a user's message) become the real tokens, as in Hugging Face's default; the
records report counts them.

eos ids, in this order and each once: `eos_token_id` of config.json (or of its `text_config`), of
generation_config.json, and the id of `eos_token` in tokenizer_config.json. The pad id is the first of them, else 0.
Special-token names come from special_tokens_map.json, overridden by tokenizer_config.json.

Chat template: chat_template.jinja, else `chat_template` in tokenizer_config.json (one string, or a list of named ones:
`default`, and `tool_use` for records with tools; more named ones in additional_chat_templates/), else
chat_template.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from cortiq_kernels import reading
from cortiq_kernels.data.record import DataError
from cortiq_kernels.data.template import ChatTemplate

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """encode text, render messages.

    eos_ids         tuple of int, possibly empty
    pad_id          the first eos id, else 0
    vocab           1 + the largest token id of the tokenizer (a model's vocabulary may be padded beyond it)
    control_tokens  texts of the special added tokens
    fingerprint     sha256 of what decides which ids a text gets; equal for teacher and student, or they cannot be
    compared
    """

    def __init__(self, model_dir: str | Path):
        self.dir = Path(model_dir)
        path = self.dir / "tokenizer.json"
        if not os.path.lexists(path):
            raise DataError(
                f"{path}: got no such file; expected a fast tokenizer: "
                "`transformers.AutoTokenizer.from_pretrained(dir).save_pretrained(dir)` writes one"
            )
        text = _read_text(path)
        self._spec = _object(path, text)
        if _untrim(self._spec):  # offsets must cover the space of a token like " the"; this changes no id
            text = json.dumps(self._spec, ensure_ascii=False)
        self._path = path
        with self._native("cannot be read as a tokenizer", "is the file complete?"):
            self._tok = tokenizers.Tokenizer.from_str(text)
        self._tok.no_truncation()
        self._tok.no_padding()
        self._config = _read_json(self.dir / "tokenizer_config.json", missing_ok=True)
        self.special = self._special_tokens()
        self.eos_ids = self._eos_ids()
        self.pad_id = self.eos_ids[0] if self.eos_ids else 0
        self.vocab = 1 + max(self._tok.get_vocab(with_added_tokens=True).values(), default=-1)
        self.control_tokens = tuple(
            t["content"] for t in self._spec.get("added_tokens") or [] if t.get("special") and t.get("content")
        )

    @contextlib.contextmanager
    def _native(self, what: str, fix: str) -> Iterator[None]:
        """The tokenizer's own code raises bare Exception, and where it panics an exception that is none."""
        try:
            yield
        except BaseException as e:
            if not isinstance(e, Exception) and type(e).__module__ != "pyo3_runtime":
                raise
            raise DataError(f"{self._path}: {what} ({reading.brief(e)}); {fix}") from None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[tokenizers.Encoding]:
        """Encodings (`.ids`, and `.offsets` in characters of the text as given)."""
        with self._native("cannot encode the records", "is it this model's own tokenizer?"):
            return self._tok.encode_batch(list(texts), add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._tok.decode([int(i) for i in ids], skip_special_tokens=False)

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = False,
        tools: list[Any] | None = None,
    ) -> str:
        """The conversation as text. TemplateFailure if the template refuses it; DataError if there is no template."""
        return self.template(tools).render(messages, add_generation_prompt, tools)

    def template(self, tools: list[Any] | None = None) -> ChatTemplate:
        """The template for a conversation: `tool_use` where there are tools and it exists, else `default`."""
        found = self._templates
        name = "tool_use" if tools and "tool_use" in found else "default"
        if name not in found:
            have = f"only templates named {', '.join(sorted(found))}" if found else "no chat template"
            raise DataError(
                f"{self.dir}: has {have}; expected chat_template.jinja or a default chat_template in "
                'tokenizer_config.json: add one, or use {"prompt", "completion"} records'
            )
        return found[name]

    def holds_control_token(self, text: str) -> bool:
        """Whether the text spells a special token, which then becomes one."""
        return any(t in text for t in self.control_tokens)

    @cached_property
    def fingerprint(self) -> str:
        spec = {k: v for k, v in self._spec.items() if k not in ("version", "truncation", "padding")}
        return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        texts: dict[str, tuple[str, str]] = {}  # name -> (text, where from)
        legacy = _read_json(self.dir / "chat_template.json", missing_ok=True).get("chat_template")
        for source, value in (
            ("chat_template.json", legacy),
            ("tokenizer_config.json", self._config.get("chat_template")),
        ):
            if isinstance(value, str):
                texts["default"] = (value, source)
            elif value is not None:
                texts.update({name: (text, source) for name, text in _named_templates(self.dir / source, value)})
        for file in sorted((self.dir / "additional_chat_templates").glob("*.jinja")):
            texts[file.stem] = (_read_text(file), f"additional_chat_templates/{file.name}")
        file = self.dir / "chat_template.jinja"
        if os.path.lexists(file):
            texts["default"] = (_read_text(file), file.name)
        return {n: ChatTemplate(text, str(self.dir / source), self.special) for n, (text, source) in texts.items()}

    def _special_tokens(self) -> dict[str, str]:
        named: dict[str, str] = {}
        for source in (_read_json(self.dir / "special_tokens_map.json", missing_ok=True), self._config):
            for name in _NAMED:
                value = source.get(name)
                value = value.get("content") if isinstance(value, dict) else value
                if isinstance(value, str):
                    named[name] = value
        return named

    def _eos_ids(self) -> tuple[int, ...]:
        config = _read_json(self.dir / "config.json", missing_ok=True)
        text_config = config.get("text_config")
        text_config = text_config if isinstance(text_config, dict) else {}
        found: list[Any] = []
        for value in (
            config.get("eos_token_id", text_config.get("eos_token_id")),
            _read_json(self.dir / "generation_config.json", missing_ok=True).get("eos_token_id"),
            self._tok.token_to_id(self.special["eos_token"]) if "eos_token" in self.special else None,
        ):
            found += value if isinstance(value, list) else [value]
        return tuple(dict.fromkeys(i for i in found if type(i) is int))


def _named_templates(path: Path, value: Any) -> list[tuple[str, str]]:
    """(name, template) from a list of {"name", "template"}, or from an object of them."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if isinstance(value, list) and all(isinstance(t, dict) for t in value):
        pairs = [(t.get("name"), t.get("template")) for t in value]
    good = isinstance(pairs, list) and all(isinstance(p, tuple) and all(isinstance(v, str) for v in p) for p in pairs)
    if not good:
        got = reading.brief(repr(value), 60)
        raise DataError(
            f'{path}: got chat_template {got}; expected text, or a list of {{"name", "template"}}. '
            "Take the model's own file."
        )
    return pairs


def _read_text(path: Path) -> str:
    try:
        return reading.read_text(path)
    except reading.Unreadable as e:
        raise DataError(f"{path}: got {e.got}; expected a file of text. {e.fix}") from None


def _object(path: Path, text: str) -> dict[str, Any]:
    try:
        value = reading.parse_json(text)
    except reading.Unreadable as e:
        raise DataError(f"{path}: got {e.got}; expected a JSON object. {e.fix}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: got a JSON {type(value).__name__}; expected an object. Take the model's own file.")
    return value


def _read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    return {} if missing_ok and not os.path.lexists(path) else _object(path, _read_text(path))


def _untrim(value: Any) -> bool:
    """Set every trim_offsets to false, in place; whether there was one to set."""
    changed = False
    if isinstance(value, dict):
        if value.get("trim_offsets") is True:
            value["trim_offsets"] = False
            changed = True
        children = [v for k, v in value.items() if k not in ("model", "added_tokens")]
    else:
        children = value if isinstance(value, list) else []
    for child in children:
        changed = _untrim(child) or changed
    return changed
