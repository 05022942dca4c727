"""Examples -> token ids and the index of the first scored token.

text        encode(text), first_target 0
completion  encode(prompt + completion) as one text
messages    encode(rendered conversation), without added special tokens
ids         as given
An eos (the first eos id) is appended to `text` and `completion` examples that do not end with one. loss_on="all" sets
first_target 0 for every kind.

first_target, for completion and messages, is the number of tokens of the prompt alone (for messages: rendered with
the generation prefix, see template.py), where these tokens are the first tokens of the whole. Otherwise a token
straddles the boundary, or the template writes the prompt differently; then it is the first token that holds a
character of the reply, so a token that straddles the boundary is scored and no character of the reply is left out.
Example: Qwen3.5 prompts end with "<think>\\n", and a reply without reasoning continues "\\n</think>\\n\\n...";
"\\n\\n" is one token there, and is the first scored one.
An empty reply (completion "", or a last message with no text, reasoning or tool call) scores nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding

from cortiq_kernels.data.examples import Example, Problem
from cortiq_kernels.data.record import DataError
from cortiq_kernels.data.template import TemplateFailure, content_text, is_empty_reply
from cortiq_kernels.data.tokens import Tokenizer

LOSS_ON = ("completion", "all")


class NoTokenizer(DataError):
    """Records of text, and no tokenizer: no line's fault."""


class Encoded(NamedTuple):
    """Token ids of one record, and where its scored part starts."""

    ids: np.ndarray  # [n] int32
    first_target: int
    by_characters: bool = False  # the boundary was found by character offsets
    control_tokens: bool = False  # a message's own text spells a control token
    no_reply: bool = False  # a conversation that does not end with an assistant message (loss_on="all" only)


class _Job(NamedTuple):
    """Text to encode; `start` is the character offset of the reply, None where everything is scored."""

    whole: str
    prompt: str | None = None
    start: int | None = None
    empty: bool = False
    template: bool = False
    control_tokens: bool = False
    no_reply: bool = False


def encode_examples(
    examples: Sequence[Example], tokenizer: Tokenizer | None, loss_on: str, vocab: int | None
) -> list[Encoded | Problem]:
    """One result per example, in order; a Problem is returned, not raised, so one report can name several lines."""
    jobs = [_guarded(_job, example, tokenizer, loss_on) for example in examples]
    encodings = _encode([j for j in jobs if isinstance(j, _Job)], tokenizer)
    out: list[Encoded | Problem] = []
    for example, job in zip(examples, jobs, strict=True):
        if isinstance(job, Problem):
            out.append(job)
        else:
            out.append(_guarded(_finish, example, tokenizer, loss_on, vocab, job, encodings))
    return out


def _guarded(function, *args):
    try:
        return function(*args)
    except Problem as problem:
        return problem


def _job(example: Example, tokenizer: Tokenizer | None, loss_on: str) -> _Job | None:
    content = example.content
    if example.kind == "ids":
        return None
    if tokenizer is None:
        raise NoTokenizer(
            f'line {example.line}: is text, and there is no tokenizer; expected {{"ids", "first_target"}}, or a model '
            "directory with a tokenizer.json"
        )
    if example.kind == "text":
        return _Job(content["text"])
    if example.kind == "completion":
        prompt, completion = content["prompt"], content["completion"]
        return _Job(prompt + completion, prompt, len(prompt), empty=not completion)
    return _conversation(example, tokenizer, loss_on)


def _conversation(example: Example, tokenizer: Tokenizer, loss_on: str) -> _Job:
    messages, tools = example.content["messages"], example.content.get("tools")
    template = tokenizer.template(tools)
    try:
        whole = template.render(messages, False, tools)
        control = any(tokenizer.holds_control_token(content_text(m)) for m in messages)
        if loss_on == "all":
            no_reply = messages[-1]["role"] != "assistant"
            return _Job(_valid(whole), template=True, control_tokens=control, no_reply=no_reply)
        if messages[-1]["role"] != "assistant":
            raise Problem(
                f"has a last message with role {messages[-1]['role']!r}; expected an assistant message, which is what "
                'is scored: remove what follows the last reply, or use loss_on="all"'
            )
        reply = template.reply_start(whole, messages, tools)
    except TemplateFailure as e:
        raise Problem(f"is refused by the chat template of {template.source}: {e}") from e
    if reply is None:
        raise Problem(
            f"rid {example.rid!r}: the reply cannot be found in the rendered conversation, since the chat template of "
            f'{template.source} rewrites it; use a {{"prompt", "completion"}} record, or loss_on="all"'
        )
    return _Job(_valid(whole), reply.prompt, reply.start, is_empty_reply(messages[-1]), True, control)


def _valid(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Problem("holds a lone surrogate in its messages; expected valid Unicode") from None
    return text


def _encode(jobs: Sequence[_Job], tokenizer: Tokenizer | None) -> dict[tuple[str, bool], Encoding]:
    """(text, is a rendered conversation) -> its encoding, for every whole and every prompt."""
    out: dict[tuple[str, bool], Encoding] = {}
    for template in (False, True):
        mine = [j for j in jobs if j.template is template]
        texts = list(dict.fromkeys([j.whole for j in mine] + [j.prompt for j in mine if j.prompt is not None]))
        if texts and tokenizer is not None:
            for text, e in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=not template), strict=True):
                out[text, template] = e
    return out


def _finish(
    example: Example,
    tokenizer: Tokenizer | None,
    loss_on: str,
    vocab: int | None,
    job: _Job | None,
    encodings: dict[tuple[str, bool], Encoding],
) -> Encoded:
    if job is None:
        first = 0 if loss_on == "all" else example.content["first_target"]
        return Encoded(_checked(example.content["ids"], vocab, "the file's ids"), first)
    assert tokenizer is not None
    whole = encodings[job.whole, job.template]
    ids = whole.ids
    first, by_characters = 0, False
    if loss_on == "completion" and job.start is not None and not job.empty:
        prompt = encodings[job.prompt, job.template].ids if job.prompt is not None else None
        if prompt is not None and ids[: len(prompt)] == prompt:
            first = len(prompt)
        else:
            first, by_characters = _first_after(whole, job.start), True
            if first is None:
                raise Problem(f"rid {example.rid!r}: no token of the reply can be found; the tokenizer drops its text")
    eos = tokenizer.eos_ids
    if not job.template and eos and (not ids or ids[-1] not in eos):
        ids = [*ids, eos[0]]
    if job.empty and loss_on == "completion":
        first = len(ids)
    return Encoded(_checked(ids, vocab, "the tokenizer's ids"), first, by_characters, job.control_tokens, job.no_reply)


def _first_after(encoding: Encoding, start: int) -> int | None:
    """The first token that ends after character `start`. Tokens added around the text have offsets (0, 0)."""
    token = encoding.char_to_token(start)  # far cheaper than the list of offsets; None where the tokenizer drops it
    if token is not None:
        return token
    return next((i for i, (_, end) in enumerate(encoding.offsets) if end > start), None)


def _checked(ids: Sequence[int], vocab: int | None, whose: str) -> np.ndarray:
    low, high = min(ids, default=0), max(ids, default=0)
    limit = 2**31 if vocab is None else vocab
    if low < 0 or high >= limit:
        bad = low if low < 0 else high
        raise Problem(
            f"token id {bad} is outside the vocabulary of {limit} ({whose}); expected 0 <= id < {limit}: "
            "use the tokenizer of this model"
        )
    return np.asarray(ids, dtype=np.int32)
