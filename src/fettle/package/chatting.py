"""The chat template of a tokenizer, as Hugging Face's files have it: for the package of a model that writes texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError, first_line
from fettle.files import read_bytes
from fettle.package.handlers.generate import CHAT, MAX_CHAT_BYTES, chat_template

_CONFIG = "tokenizer_config.json"


def read_chat(tokenizer: Path | None, template: Path | None = None) -> tuple[dict[str, bytes], dict[str, str]]:
    """The template as the package's file, and the special tokens that it may name: settings of the handler.

    `template` is a file with it; else ``chat_template.jinja`` or ``tokenizer_config.json`` has it, in the folder
    `tokenizer` or beside the file of that name, or none has. Raises `UsageError`.
    """
    folder = tokenizer.parent if tokenizer is not None and not tokenizer.is_dir() else tokenizer
    config: dict[str, Any] = {}
    if folder is not None and (folder / _CONFIG).is_file():
        try:
            config = msgspec.json.decode(read_bytes(folder / _CONFIG, 16 << 20), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise UsageError(f"{folder / _CONFIG} cannot be read: {first_line(error)}") from error
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
