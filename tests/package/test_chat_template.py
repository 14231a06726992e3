"""The chat template of a tokenizer's folder, in the forms that Hugging Face's files have."""

import json

import pytest

from fettle.errors import UsageError
from fettle.package.handlers.generate import CHAT, Handler, Settings, chat_template, read_chat


def folder(path, **config):
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_a_template_is_found_in_each_of_its_places(tmp_path):
    one = folder(tmp_path, chat_template="a", bos_token="<s>", eos_token={"content": "</s>"})
    assert read_chat(one) == ({CHAT: b"a"}, {"bos_token": "<s>", "eos_token": "</s>"})
    several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    assert read_chat(folder(tmp_path, chat_template=several))[0] == {CHAT: b"d"}
    (tmp_path / CHAT).write_text("file")
    assert read_chat(tmp_path)[0] == read_chat(tmp_path / "tokenizer.json")[0] == {CHAT: b"file"}
    assert read_chat(None) == ({}, {})


def test_what_is_no_template_is_one_line_or_nothing(tmp_path):
    assert read_chat(folder(tmp_path, chat_template=["a", {"name": "other"}])) == ({}, {})
    with pytest.raises(UsageError, match="cannot be read"):
        read_chat(folder(tmp_path, chat_template="{% if"))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(UsageError, match="cannot be read"):
        read_chat(tmp_path)


def test_a_template_finds_what_transformers_gives_it():
    """Tools that are none, today's date, JSON as Python writes it, and marks for training, which change nothing."""
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    text = """{%- if tools is not none or documents is not none %}tools{% endif %}
{{ strftime_now("%Y") }}{% set last = "none" %}
{% for message in messages %}
    {% if message.role == "assistant" %}
        {% generation %}
{{ message.content }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
{{ message | tojson }}{{ message | tojson(indent=2) }}
    {% endif %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
    messages = [{"role": "user", "content": "é <b>"}, {"role": "assistant", "content": "a"}]
    handler = Handler(Settings(bos_token="<s>", eos_token="</s>"))
    handler.chat = chat_template(text)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    [wanted], _ = rendering.render_jinja_template([messages], chat_template=text, add_generation_prompt=True, **special)
    assert handler._chatted(messages, {}) == wanted
    handler.chat = chat_template("{{ enable_thinking }}{{ messages[0].content }}")
    assert handler._chatted(messages, {"enable_thinking": False, "messages": []}) == "Falseé <b>"
