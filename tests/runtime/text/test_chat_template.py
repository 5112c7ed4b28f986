import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from runtime.text.chat_template import ChatTemplate, ChatTemplateError
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.text.conftest import CONFIG, byte_level, write_folder

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0].content is string %}
        {%- set system_message = messages[0]['content']|trim %}
    {%- else %}
        {%- set system_message = messages[0]['content'][0]['text']|trim %}
    {%- endif %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if message['content'] is string %}
            {{- message['content'] | trim }}
        {%- else %}
            {%- for content in message['content'] %}
                {%- if content['type'] == 'text' %}
                    {{- content['text'] | trim }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n')
                .split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n')
                + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ content
            ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""

MACROS = """{%- macro render(item, depth=0) -%}
{%- if item is mapping -%}{%- for key, value in item|dictsort -%}
{{ '  ' * depth }}{{ key }}: {{ render(value, depth + 1) }}
{% endfor -%}{%- elif item is iterable and item is not string -%}
{%- for value in item -%}{{ '- %s' % loop.index }}{{ render(value, depth + 1) }}{%- endfor -%}
{%- else -%}{{ item ~ '' }}{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
{%- if loop.index > 3 -%}{%- break -%}{%- endif -%}
{{ message.role|upper|center(12) }}|{{ message.content|replace('a', 'aa')|indent(4) }}
{% endfor -%}
{{ render(tools or []) }}{{ [1, 2, 3]|map('string')|join('-') }}{{ '{:>5}'.format('x') }}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "gemma": GEMMA,
    "macros": MACROS,
}

TALK = [
    {"role": "user", "content": "  Hi! <b>&amp; \"quotes\" 'single' {{ 7 * 7 }} {% x %}\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHallo 😀"},
    {"role": "user", "content": "人工智能? \t"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a <place> & more: é",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "need a tool",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"place": "Köln"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": '{"t": 20}'},
]
SYSTEM = {"role": "system", "content": "Be brief."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": TALK[:1],
    "talk": TALK,
    "system": [SYSTEM, *TALK],
    "calls": CALLS,
    "thought": [TALK[0], {"role": "assistant", "content": "so", "reasoning_content": "hm"}],
}


def folder_with(root: Path, template: Any, **config: Any) -> Path:
    entry = {} if template is None else {"chat_template": template}
    return write_folder(root, byte_level(), CONFIG | entry | config)


def opened(folder: Path) -> ChatTemplate:
    tokenizer = TextTokenizer.open(folder)
    assert tokenizer is not None
    template = ChatTemplate.open(folder, tokenizer.named_tokens)
    assert template is not None
    return template


def theirs(folder: Path, messages: Any, tools: Any = None, prompt: bool = True, **kw: Any) -> str:
    reference = AutoTokenizer.from_pretrained(folder)
    text = reference.apply_chat_template(
        messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **kw
    )
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("with_tools", [True, False])
def test_prompts_are_those_of_transformers(tmp_path, name, chat, with_tools):
    folder = folder_with(tmp_path, TEMPLATES[name])
    ours = opened(folder)
    for prompt in (True, False):
        tools = TOOLS if with_tools else None
        try:
            expected = theirs(folder, CHATS[chat], tools, prompt, date_string="1 May 2025")
        except Exception:
            with pytest.raises(ChatTemplateError):
                ours.render(
                    CHATS[chat],
                    tools=tools,
                    add_generation_prompt=prompt,
                    template_kwargs={"date_string": "1 May 2025"},
                )
            continue
        assert expected == ours.render(
            CHATS[chat],
            tools=tools,
            add_generation_prompt=prompt,
            template_kwargs={"date_string": "1 May 2025"},
        )


def test_each_template_renders_most_chats(tmp_path):
    """So that the equality above is not one of failures."""
    rendered = dict.fromkeys(TEMPLATES, 0)
    for name, template in TEMPLATES.items():
        ours = opened(folder_with(tmp_path / name, template))
        for chat in CHATS.values():
            try:
                rendered[name] += len(ours.render(chat)) > 10
            except ChatTemplateError:
                rendered[name] += 0
    assert rendered == {
        "chatml": 4, "llama3": 5, "mistral": 3, "qwen": 5, "gemma": 4, "macros": 5,
    }  # fmt: skip


def test_the_prompts_tokens_are_those_of_transformers(tmp_path):
    folder = folder_with(tmp_path, CHATML)
    tokenizer = TextTokenizer.open(folder)
    assert tokenizer is not None
    tokens = tokenizer.encode(opened(folder).render(TALK), add_special_tokens=False)
    reference = AutoTokenizer.from_pretrained(folder)
    assert tokens == reference.apply_chat_template(
        TALK, add_generation_prompt=True, return_dict=False
    )


def test_variables_of_the_request_reach_the_template(tmp_path):
    folder = folder_with(tmp_path, QWEN)
    ours = opened(folder).render(TALK, template_kwargs={"enable_thinking": False})
    assert ours == theirs(folder, TALK, enable_thinking=False)
    assert ours.endswith("</think>\n\n")
    with pytest.raises(ChatTemplateError, match="'tools' is a field of its own"):
        opened(folder).render(TALK, template_kwargs={"tools": []})


def test_documents_reach_the_template(tmp_path):
    folder = folder_with(tmp_path, "{% for d in documents %}{{ d.title }}:{{ d.text }}{% endfor %}")
    documents = [{"title": "a", "text": "b"}]
    assert opened(folder).render(TALK, documents=documents) == theirs(
        folder, TALK, documents=documents
    )


def test_the_date_of_today_is_put_in(tmp_path):
    folder = folder_with(tmp_path, "{{ strftime_now('%Y') }}")
    assert opened(folder).render(TALK) == theirs(folder, TALK)


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_a_template_that_takes_parts_gets_them(tmp_path, name):
    folder = folder_with(tmp_path, TEMPLATES[name])
    ours = opened(folder)
    assert ours.content == "both"
    chat = [{"role": "user", "content": PARTS}]
    assert ours.render(chat) == theirs(folder, chat)


@pytest.mark.parametrize("name", ["chatml", "mistral", "qwen"])
def test_a_template_that_takes_texts_gets_the_parts_joined(tmp_path, name):
    folder = folder_with(tmp_path, TEMPLATES[name])
    ours = opened(folder)
    assert ours.content == "text"
    expected = theirs(folder, [{"role": "user", "content": "one\ntwo"}])
    assert ours.render([{"role": "user", "content": PARTS}]) == expected
    assert ours.render([{"role": "user", "content": ["one", "two"]}]) == expected


def test_a_template_that_takes_parts_only_gets_a_text_as_one(tmp_path):
    folder = folder_with(
        tmp_path,
        "{% for m in messages %}{% for p in m.content %}[{{ p.type }}: {{ p['text'] }}]"
        "{% endfor %}{% endfor %}",
    )
    ours = opened(folder)
    assert ours.content == "parts"
    assert ours.render([{"role": "user", "content": "hi"}]) == "[text: hi]"


def test_a_part_that_is_no_text_is_refused_where_texts_are_taken(tmp_path):
    ours = opened(folder_with(tmp_path, CHATML))
    with pytest.raises(ChatTemplateError, match="image_url"):
        ours.render([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


@pytest.mark.parametrize("kind", ["list", "jinja", "jinja_and_folder", "processor"])
def test_templates_are_found_wherever_checkpoints_have_them(tmp_path, kind):
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": LLAMA3}]
    folder = folder_with(tmp_path, named if kind == "list" else None)
    if kind.startswith("jinja"):
        (folder / "chat_template.jinja").write_text(CHATML)
    if kind == "jinja_and_folder":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(LLAMA3)
    if kind == "processor":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    ours = opened(folder)
    assert ours.render(TALK).startswith("<|im_start|>system")
    if kind == "processor":
        return  # only processors of images read this file in transformers
    for tools in (None, TOOLS):
        kwargs = {"date_string": "x"}
        assert ours.render(TALK, tools=tools, template_kwargs=kwargs) == theirs(
            folder, TALK, tools, **kwargs
        )


def test_a_file_given_by_the_operator_comes_first(tmp_path):
    folder = folder_with(tmp_path / "model", CHATML)
    file = tmp_path / "mine.jinja"
    file.write_text("mine: {{ messages[0].content }}")
    ours = ChatTemplate.open(folder, {}, file=file)
    assert ours is not None
    assert ours.render([{"role": "user", "content": "x"}]) == "mine: x"


def test_a_folder_without_a_template_has_none(tmp_path):
    assert ChatTemplate.open(folder_with(tmp_path, None), {}) is None


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("line one\n{% if %}", "line 2"),
        ("{{ unclosed", "line 1"),
        (3, "must be a text or a list"),
        ([{"name": "default"}], "must be a text or a list"),
        ([{"name": "rag", "template": "x"}], "--chat-template FILE"),
        ([], "must be a text or a list"),
    ],
)
def test_a_template_that_is_none_is_refused_at_the_start(tmp_path, template, says):
    folder = folder_with(tmp_path, template)
    with pytest.raises(ChatTemplateError, match=says) as caught:
        opened(folder)
    assert "tokenizer_config.json" in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path):
    file = tmp_path / "x.jinja"
    with pytest.raises(ChatTemplateError, match=r"x\.jinja"):
        ChatTemplate.open(tmp_path, {}, file=file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ChatTemplateError, match=r"x\.jinja"):
        ChatTemplate.open(tmp_path, {}, file=file)


def test_what_the_template_says_against_the_messages_is_passed_on(tmp_path):
    ours = opened(folder_with(tmp_path, MISTRAL))
    with pytest.raises(ChatTemplateError, match="template says: Conversation roles must alternate"):
        ours.render([TALK[0], TALK[0]])
    with pytest.raises(ChatTemplateError, match="must not be empty"):
        ours.render([])
    with pytest.raises(ChatTemplateError, match="must be JSON, found a set"):
        ours.render([{"role": "user", "content": {1, 2}}])


def test_many_threads_render_with_one_template(tmp_path):
    ours = opened(folder_with(tmp_path, QWEN))
    expected = [ours.render(chat) for chat in CHATS.values()]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            assert list(pool.map(ours.render, CHATS.values())) == expected
