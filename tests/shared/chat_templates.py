"""Chat templates in the manner of known families, and a tokenizer of bytes with their special tokens."""

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|eot|>", "<think>")
CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
LLAMA3 = """{%- set date = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n\\nToday Date: " + date + "\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n\\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
MISTRAL = """{%- set ns = namespace(system="") -%}
{%- for message in messages -%}
    {%- if message["role"] == "system" -%}{%- set ns.system = message["content"] -%}{%- continue -%}{%- endif -%}
    {%- if message["role"] == "user" -%}
        {{- "[INST] " -}}
        {%- if loop.last and ns.system -%}{{- ns.system + "\\n\\n" -}}{%- endif -%}
        {{- message["content"] + " [/INST]" -}}
    {%- else -%}
        {%- generation -%}{{- " " + message["content"] + eos_token -}}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}"""
QWEN3 = """{%- set ns = namespace(last_query_index=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == "user" and message.content is string %}
        {%- set ns.found = true %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = message.content | map(attribute='text') | join(' + ') %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
ZEPHYR = """{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{% endfor %}
{{ messages | tojson(indent=1) }}{{ pad_token }}{{ tools }}{{ documents is none }}"""
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "zephyr": ZEPHYR,
}


def byte_tokenizer() -> Tokenizer:
    """Every byte a token, the special ones before them: 264 tokens."""
    vocabulary = {text: i for i, text in enumerate([*SPECIAL, *sorted(ByteLevel.alphabet())])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = Decoder()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer
