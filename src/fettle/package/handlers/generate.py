"""The handler for text generation: prompts in, one token after the other out (`running` writes them).

Where the package's model takes the keys and values of the tokens before, each step runs the new token only; else every
step runs the whole text, so that a text of n tokens costs n calls that grow with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fettle.errors import UsageError, first_line, refusing
from fettle.files import read_bytes, read_text
from fettle.package.handlers.asking import Ask
from fettle.package.handlers.parts import LAST, LOGITS, PAST, READ, SEEN, SOURCE, SOURCE_MASK, output_index
from fettle.package.handlers.text import TOKENIZER, read_tokenizer
from fettle.package.tensors import TensorSpec

CHAT, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
MAX_CHAT_BYTES = 1 << 20
_INPUTS = ("input_ids", "attention_mask", LAST, SEEN, PAST, SOURCE, SOURCE_MASK, READ)
_ENDS = ("</s>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "[SEP]", "<eos>")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="generate"):
    """Settings of the generate handler."""

    max_tokens: Annotated[int, Meta(le=1 << 20)] = 1024
    """The most tokens of prompt and answer together; of each where an encoder reads the prompt."""
    max_new_tokens: Annotated[int, Meta(ge=1)] = 256
    """The most tokens of an answer; a request may ask for fewer."""
    stop_tokens: tuple[int, ...] = ()
    """An answer ends before one of these, or before `eos_token`. Empty: the tokenizer's usual end."""
    start_tokens: tuple[int, ...] = ()
    """What a decoder begins with where an encoder reads the prompt."""
    max_characters: Annotated[int, Meta(ge=1)] = 200_000
    bos_token: str = ""
    eos_token: str = ""
    """What the chat template may name, as the tokenizer's own settings say."""

    def __post_init__(self) -> None:
        if self.max_new_tokens > self.max_tokens:
            raise ValueError("max_new_tokens is at most max_tokens")


class TooLong(UsageError):
    """A prompt, or what is to follow it, for which the model has no room."""


def suggest(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], files: set[str]) -> Settings:
    """The usual lengths; `fettle.package.export` gives the model its input and output."""
    if TOKENIZER not in files:
        raise UsageError("the generate handler needs a tokenizer: give a `tokenizer`, its tokenizer.json")
    return Settings()


class Handler:
    """What a generating package knows besides its model: tokenizer, chat template, lengths."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def initialize(self, context: Any) -> None:
        """Read the tokenizer and the chat template; keep the runner."""
        self.runner, self.inputs = context.runner, context.manifest.inputs
        names = [spec.name for spec in self.inputs]
        if "input_ids" not in names or LAST not in names or set(names) - set(_INPUTS):
            raise UsageError(f"the generate handler fills {', '.join(_INPUTS)}; the model has {', '.join(names)}")
        self.outputs = context.manifest.outputs
        self.place = output_index(self.outputs, LOGITS)
        self.keeps = PAST in names
        self.begins = self.settings.start_tokens if SOURCE in names else ()
        if SOURCE in names and not self.begins:
            raise UsageError("the decoder has no start_tokens: give them in `handler_settings`")
        most, own = self.settings.max_tokens, len(self.begins) + self.settings.max_new_tokens
        self.longest = most + min(most, own) if self.begins else most
        """Tokens of the longest text, its prompt among them."""
        self.tokenizer = read_tokenizer(context.folder)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.vocabulary = self.outputs[self.place].shape[-1]
        # Tokens that were added may be more than the model has: Gemma 3's of pictures, many a one for padding.
        words = self.tokenizer.get_vocab_size(with_added_tokens=False)
        if words > self.vocabulary:
            raise UsageError(f"the tokenizer has {words} tokens and the model {self.vocabulary}: it is another model's")
        ends = [self.settings.eos_token, *(() if self.settings.stop_tokens else _ENDS)]
        named = {self.tokenizer.token_to_id(token) for token in ends} - {None}
        self.stop = {*self.settings.stop_tokens, *named}
        path = context.folder / CHAT
        self.chat = chat_template(read_text(path, MAX_CHAT_BYTES)) if path.is_file() else None

    def prompt(self, ask: Ask) -> list[int]:
        """The tokens of a prompt. Raises `UsageError`."""
        if max(ask.sampling.logit_bias, default=0) >= self.vocabulary:
            raise UsageError(f"logit_bias is for tokens of the model, from 0 to {self.vocabulary - 1}")
        if ask.tokens is not None:
            size = min(self.tokenizer.get_vocab_size(), self.vocabulary)
            if not all(0 <= token < size for token in ask.tokens):
                raise UsageError(f"the prompt's tokens are from 0 to {size - 1}")
            return list(ask.tokens)
        text, special = ask.text or "", True
        if ask.messages is not None:
            text, special = self._chatted(ask.messages, ask.template or {}), False  # the template has them
        if len(text) > self.settings.max_characters:
            raise TooLong(f"a prompt may have at most {self.settings.max_characters} characters")
        tokens = list(self.tokenizer.encode(text, add_special_tokens=special).ids)
        if max(tokens, default=0) >= self.vocabulary:
            name = self.tokenizer.id_to_token(max(tokens))
            raise UsageError(f"the prompt has a token that the model does not: {name}")
        return tokens

    def room(self, prompt: Sequence[int], ask: Ask) -> int:
        """How many tokens may follow. Raises `TooLong`."""
        most, wanted = self.settings.max_tokens, ask.sampling.max_tokens
        if not prompt:
            raise UsageError("the prompt is empty")
        read = len(self.begins) or len(prompt)  # what the decoder reads before it writes
        longest = most if self.begins else most - 1
        if len(prompt) > longest:
            raise TooLong(f"a prompt has at most {longest} tokens, this one {len(prompt)}")
        room = min(self.settings.max_new_tokens, most - read)
        if ask.strict and wanted is not None and wanted > room:
            raise TooLong(
                f"this model writes at most {self.settings.max_new_tokens} tokens, and with the prompt {most}: "
                f"{len(prompt)} in the prompt and {wanted} after it are too many"
            )
        return min(wanted or room, room)

    def _chatted(self, messages: Sequence[dict[str, Any]], told: Mapping[str, Any]) -> str:
        if self.chat is None:
            raise UsageError("this model has no chat template: package it with one, or ask for completions")
        settings = self.settings
        try:
            return str(self.chat.render({
                "add_generation_prompt": True, **told, "messages": list(messages), "tools": None, "documents": None,
                "bos_token": settings.bos_token, "eos_token": settings.eos_token,
            }))  # fmt: skip
        except Exception as error:  # whatever the template raises about these messages
            raise UsageError(f"the chat template refuses the messages: {first_line(error)[:200]}") from error


def chat_template(text: str) -> Any:
    """A chat template, which is a program: it runs where it can reach nothing, and finds there what transformers gives
    to templates. Raises `UsageError`."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, which marks the assistant's own words for training: here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise ValueError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    extensions: list[Any] = [loopcontrols, Generation]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    with refusing("the chat template cannot be read:", TemplateError):
        return made.from_string(text)


def read_chat(tokenizer: Path | None, template: Path | None = None) -> tuple[dict[str, bytes], dict[str, str]]:
    """The template as the package's file, and the special tokens that it may name: settings of the handler.

    `template` is a file with it; else ``chat_template.jinja`` or ``tokenizer_config.json`` has it, in the folder
    `tokenizer` or beside the file of that name, or none has. Raises `UsageError`.
    """
    folder = tokenizer.parent if tokenizer is not None and not tokenizer.is_dir() else tokenizer
    config: dict[str, Any] = {}
    if folder is not None and (folder / _TOKENIZER_CONFIG).is_file():
        with refusing(f"{folder / _TOKENIZER_CONFIG} cannot be read:", (ValueError, RecursionError)):
            config = msgspec.json.decode(read_bytes(folder / _TOKENIZER_CONFIG, 16 << 20), type=dict[str, Any])
    special = {key: _content(config[key]) for key in ("bos_token", "eos_token") if config.get(key)}
    if template is None and folder is not None and (folder / CHAT).is_file():
        template = folder / CHAT
    text: Any = config.get("chat_template")
    if isinstance(text, list):  # several, by name
        named = [one for one in text if isinstance(one, dict) and one.get("name") == "default"]
        text = named[0].get("template") if named else None
    content = read_bytes(template, MAX_CHAT_BYTES) if template is not None else str(text or "").encode()
    if not content:
        return {}, special
    try:
        chat_template(content.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{template} is not text in UTF-8") from error
    return {CHAT: content}, special


def _content(token: Any) -> str:
    """A special token as text or as ``{"content": text, ...}``."""
    return str(token.get("content", "") if isinstance(token, dict) else token)
