"""Chat templates, rendered as Hugging Face renders them, and where the reply starts in the rendered text.

A template is Jinja in an immutable sandbox with trim_blocks, lstrip_blocks, break/continue, a `{% generation %}`
block that renders its body, `raise_exception`, `strftime_now`, and a `tojson` that does not escape HTML. It sees
`messages` (keys that are None removed; `reasoning_content`, `thinking` and `reasoning` are one field), `tools`,
`documents` (None), `add_generation_prompt`, and the special tokens by name (`bos_token`, `eos_token`, ...).

The reply is the last assistant message, and its span runs to the end of the rendered text. `reply_start` finds where
it starts:

1. Render the messages before it with the generation prefix. If the whole starts with that text, the span starts right
   after (so a reply scores everything that the model has to write after the prefix, an empty think block included).
2. Else (the template adds something to the prefix that it does not put into a finished reply, or writes earlier
   messages differently once the reply is there): render the whole again with a marker in place of the reply's text
   (and of its reasoning); the text before the marker must be a prefix of the whole, and the span starts where the
   marker is. Both renderings have the same messages, so whatever the template does to earlier ones it does in both,
   and text that the user wrote, control tokens included, cannot move the boundary.
3. Else there is no answer, and None is returned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cortiq_kernels.data.record import DataError

_REASONING = ("reasoning_content", "thinking", "reasoning")
_LONGEST = 1 << 26  # characters that a template's `*` may make, and bits of its `**`
# Two private-use characters around letters: no tokenizer or template treats it specially, trimming leaves it whole.
_MARKER = "\ue0c7reply\ue0c8"


class TemplateFailure(DataError):
    """The template refused the messages, or failed on them; the text is the template's own."""


class Reply(NamedTuple):
    """`start`: character offset of the span. `prompt`: the text before it, where that is the prompt's own rendering."""

    start: int
    prompt: str | None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: only marks the assistant's text, so its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses products and powers that would take all memory, or forever."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, within limits."""
        if operator == "**" and all(isinstance(v, int) for v in (left, right)):
            size = abs(right) * left.bit_length()
        else:
            size = max((len(a) * b for a, b in ((left, right), (right, left))
                        if isinstance(a, str | list | tuple) and isinstance(b, int)), default=0)  # fmt: skip
        if size > _LONGEST:
            raise jinja2.TemplateError(f"{operator} makes a value that is too large")
        return super().call_binop(context, operator, left, right)


def _environment() -> jinja2.Environment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return env


def _prepared(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for message in messages:
        message = {k: v for k, v in message.items() if v is not None}
        reasoning = next((message[k] for k in _REASONING if k in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        out.append(message)
    return out


class ChatTemplate:
    """One compiled template. `source` names the file it came from, `special` maps names to special-token text."""

    def __init__(self, text: str, source: str, special: Mapping[str, str]):
        self.text, self.source, self.special = text, source, dict(special)
        try:
            self._template = _environment().from_string(text)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as e:
            raise DataError(f"{source}: the chat template is not valid Jinja ({e}); fix or replace it") from e

    def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = False, tools: list[Any] | None = None
    ) -> str:
        """The text. TemplateFailure with the template's words if it raises."""
        try:
            return self._template.render(
                **self.special,
                messages=_prepared(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as e:  # a template is a program over the user's data: whatever it raises is its refusal
            raise TemplateFailure(str(e) or type(e).__name__) from e

    def reply_start(self, whole: str, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Reply | None:
        """Where the last message's span starts in `whole` = render(messages), as the module docstring says."""
        if len(messages) > 1:
            try:
                prompt = self.render(messages[:-1], True, tools)
            except TemplateFailure:  # some templates only render complete exchanges; the marker needs no prompt
                prompt = None
            if prompt is not None and whole.startswith(prompt):
                return Reply(len(prompt), prompt)
        marker = _MARKER
        while marker in whole:  # someone's text holds it
            marker += _MARKER
        marked = self.render([*messages[:-1], _marked(messages[-1], marker)], False, tools)
        before, found, _ = marked.partition(marker)
        return Reply(len(before), None) if found and whole.startswith(before) else None


def _marked(message: dict[str, Any], marker: str) -> dict[str, Any]:
    """The message with the marker for its text and for its reasoning (a field, or <think> text), which comes first."""
    content = message.get("content")
    text = content_text(message)
    shape = f"<think>\n{marker}\n</think>\n\n{marker}" if "</think>" in text else marker
    marked = {**message, "content": shape}
    if isinstance(content, list):
        marked["content"] = [{"type": "text", "text": shape}]
    for key in _REASONING:
        if message.get(key) is not None:
            marked[key] = marker
    return marked


def content_text(message: Mapping[str, Any]) -> str:
    """The text of a message whose content is a string, a list of parts, or absent."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))


def is_empty_reply(message: Mapping[str, Any]) -> bool:
    """Nothing to learn: no text, no reasoning, no tool call."""
    return not (content_text(message) or message.get("tool_calls") or any(message.get(k) for k in _REASONING))
