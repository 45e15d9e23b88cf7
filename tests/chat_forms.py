"""Chat templates in the forms that models have, and expressions of their language, for tests/chats_test.py."""

# «» stands for {% generation %} and {% endgeneration %}, which the plain form of a template does not have.
FORMS = {
    "chatml": """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message.role == 'assistant' %}«{{ message['content'] + '<|im_end|>' }}»{{ '\\n' }}{% else %}{{ message['content'] + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "qwen2": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You answer shortly.' }}
    {%- endif %}
    {{- "\\n\\nTools:\\n" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou answer shortly.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' }}«
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}»{{ '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "qwen3": """{%- set ns = namespace(looking=true, last_question=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.looking = false %}
        {%- set ns.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role != "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {%- set text = message.content or '' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}«
        {%- if loop.index0 > ns.last_question and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') }}
        {%- else %}
            {{- text }}
        {%- endif %}
        {{- '<|im_end|>' }}»{{ '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "llama3": """{% set loop_messages = messages %}{% for message in loop_messages %}{% set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}{% if loop.index0 == 0 %}{% set head = bos_token + head %}{% endif %}{{ head }}{% if message.role == 'assistant' %}«{{ message['content'] | trim + '<|eot_id|>' }}»{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
""",
    "llama3.1": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "01 Jan 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{#- the functions come first #}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if message.role == 'assistant' %}«{{ message['content'] | trim + '<|eot_id|>' }}»
        {%- else %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}«
        {{- '{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}»
    {%- else %}
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
""",
    "mistral": """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must take turns!') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}«{{ message['content'] + eos_token }}»{{ ' ' }}{% else %}{{ raise_exception('Only user and assistant speak!') }}{% endif %}{% endfor %}""",
    "nemo": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set questions = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Roles must take turns!") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == questions[-1]) %}
            {{- "[TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{ ", " }}{% endif %}
                {%- endfor %}
                {{- "}" if loop.last else "}, " }}
            {%- endfor %}
            {{- "][/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined %}«
        {{- "[TOOL_CALLS][" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' ~ call.id ~ '"}' ~ (']' ~ eos_token if loop.last else ', ') }}
        {%- endfor %}»
    {%- elif message["role"] == "assistant" %}«
        {{- message["content"] + eos_token}}»
    {%- else %}
        {{- '[RESULT]{"content": ' + message.content|string + '}[/RESULT]' }}
    {%- endif %}
{%- endfor %}
""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('There is no system here') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' }}{% if role == 'model' %}«{{ message['content'] | trim + '<end_of_turn>' }}»{{ '\\n' }}{% else %}{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}«{{ message['content'] + eos_token }}»{{ '' }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "phi": """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' }}«{{ message['content'] + '<|end|>' }}»{{ '\\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "plain": """{%- macro title(role) -%}
### {{ 'Question' if role == 'user' else role | capitalize }}:
{% endmacro -%}
{%- for message in messages if message.role != 'tool' -%}
{%- if message.role == 'assistant' -%}
### Answer:
«{{ message.content + '\\n\\n' }}»{%- else -%}
{{ title(message.role) }}{{ message.content }}

{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
### Answer:
{% endif -%}
""",
}
WITHOUT_SYSTEM, WITH_CALLS = {"mistral", "gemma"}, {"qwen2", "llama3.1", "nemo"}
MARKS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
         "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|system|>", "<|end|>", "<think>", "</think>", "<tool_call>",
         "</tool_call>", "[TOOL_CALLS]", "<s>", "</s>"]
TEXTS = ["Hi", "", "  two spaces \n", "Grüße, 你好 😀!", "\n\nlines\n\n", "<think>\nhm\n</think>\n\nYes.", "half</think> of it", "\u3000wide\u00a0",
         "it's \"quoted\" \\ \t", "<|im_end|>", "1234567 [INST] x", "{\"a\": 1}", "e\u0301 composes", "word " * 40, "<b>html</b> & more", "."]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Says <b>it</b> & more", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}}, "required": ["city"]}}}]
SAMPLE = "\n".join(TEXTS) + " the quick brown fox answers questions about the weather in Paris and Zürich. " * 20


EXPRESSIONS = """{{ t }}|{{ t|trim }}|{{ t.strip() }}|{{ t.lstrip() }}|{{ t.rstrip() }}|{{ t.strip(' T') }}|{{ t | trim(' ,sT') }}
{{ m }} {{ m.list }} {{ m.map }} {{ [t, 'a\\'b', 'a\\'b"c', '\\n\\t\\\\\\x07é\\u200b'] }} {{ (1,) }} {{ () }} {{ (1, 'a') }} {{ {} }} {{ [] }}
{{ 1 }} {{ 1.0 }} {{ 1e }}{{ 2.50 }} {{ -3 }} {{ 10 // 3 }} {{ -10 // 3 }} {{ -10 % 3 }} {{ 10 % -3 }} {{ 7 / 2 }} {{ 2 + 3 * 4 - 1 }} {{ m.x + 1 }} {{ m.x * 2 }} {{ 0.1 + 0.2 }} {{ 1_000 }} {{ 123456789.0 * 1000000000 }} {{ 1 / 3 }} {{ 0.00001 / 3 }}
{{ true }} {{ True and 0 }} {{ '' or 'b' }} {{ not '' }} {{ none }} {{ None or none }} {{ 1 and 2 }} {{ true + 1 }} {{ -true }}
{{ 1 == 1.0 }} {{ 1 == true }} {{ '1' == 1 }} {{ [1, 2] == [1, 2] }} {{ {'a': 1} == {'a': 1.0} }} {{ none == undefined_one }} {{ undefined_one == undefined_two }} {{ 1 < 2 < 3 }} {{ 1 < 2 > 5 }} {{ 'a' < 'b' }} {{ 2 >= 2 }} {{ 1 != 2 }} {{ (1,) == [1] }}
{{ 'T' in t }} {{ 'zz' not in t }} {{ 3 in m.list }} {{ 'b' in m.map }} {{ 'z' in m.map }} {{ none in m.list }} {{ 'a' in undefined_one }} {{ 1 in [true] }} {{ 'd' in {'d': 1} and 2 }}
{{ t[0] }}{{ t[2] }}{{ t[-2] }}{{ t[99] }} {{ t[1:4] }} {{ t[::-1] }} {{ t[:-3] }} {{ t[-4:] }} {{ t[10:2:-3] }} {{ m.list[1:] }} {{ m.list[::-1] }} {{ m.list[-1] }} {{ m.list[:none] }} {{ m.list[5:1] }} {{ t[none:3] }} {{ m.list[-99:2] }} {{ m.list[3:-99:-1] }}
{{ t.upper() if false else 'x' }} {{ 'x' if false }} {{ 'a' if 1 else 'b' if 1 else 'c' }} {{ ('a' if 0 else 'b') ~ 'c' }}
{{ 'abc'.upper() }} {{ 'ABC'|lower }} {{ 'hello wOrld'|capitalize }} {{ "they're bill's".title() }} {{ 'hello'.capitalize() }} {{ 'a' ~ 1 ~ none ~ true ~ 1.5 ~ undefined_one }}
{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a,b,c'.split(',', 1) }} {{ ' a b c '.split(none, 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ 'aXbX'.split('X')[-1] }} {{ ''.split(',') }} {{ ''.split() }}
{{ 'banana'.replace('an', 'x') }} {{ 'banana'.replace('an', 'x', 1) }} {{ 'banana'|replace('a', '') }} {{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'bc')) }} {{ 'banana'.count('an') }} {{ 'bänana'.find('n') }} {{ 'x'.find('y') }} {{ 'prefix'.removeprefix('pre') }} {{ 'prefix'.removesuffix('x') }} {{ 'a{}b{}'.format(1, 'z') }} {{ '{x}{{}}'.format(x=t) }} {{ ', '.join(['a', 'b']) }}
{{ m.map.get('b') }} {{ m.map.get('z') }} {{ m.map.get('z', 'q') }} {{ m.map.items() | list }} {{ m.map.keys() | list }} {{ m.map.values() | list }} {{ m['map']['A'] }} {{ m.map.c[1].d }} {{ m.nothing }} {{ m['nothing'] }}
{% for k, v in m.map.items() %}{{ k }}={{ v }};{% endfor %}{% for k in m.map %}{{ k }}{% endfor %}{% for c in 'añb' %}<{{ c }}>{% endfor %}{% for k, v in m.map | dictsort %}{{ k }}{% endfor %}{% for k, v in m.map|items %}{{ v }}{% endfor %}
{{ m.map | tojson }} {{ m.map | tojson(indent=2) }} {{ 'é"<&\\n\\x7f\\u2028😀' | tojson }} {{ 'é😀\\x7f' | tojson(ensure_ascii=true) }} {{ [] | tojson(indent=2) }} {{ {} | tojson }} {{ [1, 2.0, 1e16 if false else m.list[4], none, [[]], {'a': []}] | tojson(indent=1) }} {{ m.map | tojson(sort_keys=true) }} {{ (1, 2) | tojson }} {{ t | tojson }} {{ true | tojson }}
{{ t | length }} {{ m.list | length }} {{ m.map | count }} {{ '' | length }} {{ undefined_one | length }} {{ undefined_one | default('d') }} {{ '' | default('d') }} {{ '' | default('d', true) }} {{ none | d('x') }} {{ false | default('x', boolean=true) }} {{ m.nothing | default }}
{{ ['a', 'b'] | join }} {{ [1, none, 'x'] | join(', ') }} {{ [{'n': 1}, {'n': 2}] | join('-', attribute='n') }} {{ 'abc' | join('.') }} {{ [3, 1, 2] | sort }} {{ ['b', 'A', 'c'] | sort }} {{ ['b', 'A'] | sort(reverse=true) }} {{ [{'n': 2}, {'n': 1}] | sort(attribute='n') }} {{ [1, 1, 'a', 'A'] | unique | list }} {{ [1, 2] | reverse | list }} {{ 'abc' | reverse }} {{ [1, 2] | first }} {{ 'ab' | last }} {{ [] | first }} {{ '12' | int }} {{ 5 | string + 'a' }} {{ 'x' | list }} {{ 'a\\nb\\n\\nc' | indent(2) }} {{ 'a\\nb' | indent(width=1, first=true) }} {{ 'x' | safe }}
{{ messages | map(attribute='role') | list }} {{ [{'a': {'b': 1}}, {}] | map(attribute='a.b', default=0) | list }} {{ ['a ', ' b'] | map('trim') | list }} {{ [1, 'a', 2] | select('number') | list }} {{ [1, 'a'] | reject('string') | list }} {{ [0, 1] | select | list }} {{ [{'r': 'a'}, {'r': 'b'}, {}] | selectattr('r', 'equalto', 'a') | list }} {{ [{'r': 'a'}, {}] | selectattr('r') | list }} {{ [{'r': 'a'}, {}] | rejectattr('r', 'defined') | list }} {{ [{'r': 1}] | selectattr('r', 'in', [1, 2]) | list }} {{ [{'r': 1}] | selectattr('r', '==', 1) | list | length }} {{ none | selectattr('x') | list }}
{{ t is defined }} {{ undefined_one is defined }} {{ undefined_one is undefined }} {{ t is not undefined }} {{ none is none }} {{ undefined_one is none }} {{ t is string }} {{ m is mapping }} {{ m is iterable }} {{ 1 is iterable }} {{ t is sequence }} {{ 1 is number }} {{ true is number }} {{ 1 is integer }} {{ true is integer }} {{ 1.0 is float }} {{ true is boolean }} {{ true is true }} {{ 1 is true }} {{ false is false }} {{ 3 is odd }} {{ 4 is even }} {{ 9 is divisibleby 3 }} {{ 1 is eq 1 }} {{ 'a' is in 'abc' }} {{ 'a' is in ['a'] }} {{ 'a' is equalto('a') }} {{ not t is none and t is string or false }} {{ 1 is ne(2) }}
{% set x = 1 %}{% for i in range(3) %}{{ x }}{% set x = i + 5 %}{{ x }},{% endfor %}{{ x }}{% if true %}{% set x = 9 %}{% endif %}{{ x }}
{% set ns = namespace(a=1, b=[]) %}{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% set ns.b = ns.b + [i] %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.nothing }}{{ ns['a'] }}
{% for i in [5, 6, 7] %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }} {% endfor %}{% for i in [] %}x{% else %}none{% endfor %}{% for i in range(9) if i is odd %}{{ i }}{{ loop.index }}{% if i > 4 %}{% break %}{% endif %}{% endfor %}{% for i in range(5, 0, -2) %}{% if i == 3 %}{% continue %}{% endif %}{{ i }}{% endfor %}{% for i in undefined_one %}x{% endfor %}{% for (a, b) in [[1, 2], (3, 4)] %}{{ a }}{{ b }}{% endfor %}{% for i in 1, 2 %}{{ i }}{% endfor %}
{% macro f(a, b='B', c=none) %}[{{ a }}{{ b }}{{ c }}{{ x }}]{% endmacro %}{{ f(1) }}{% set x = 'X' %}{{ f('p', c=2) }}{{ f() }}{{ f(1, 2, 3) }}{{ f(b=1) | length }}{% set g %} a {{ f(0) }} {% endset %}{{ g }}|{% filter trim %}  q {% endfilter %}
{% macro f() %}[{{ i }}{{ x }}]{% endmacro %}{% for i in [1] %}{% set x = 2 %}{{ f() }}{% endfor %}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set a = 'x', 'y' %}{{ a }}{{ dict(a=1, b='c') }}{{ {'a': 1, 'b': {'c': 2}}['b'].c }}{{ {'x': {'y': 1}} }}{{ 'a' 'b' }}{{ "it's" }}{{ '\\q\\x41' }}
a   {%- if true -%}   b   {%- endif %}   c {{- 'd' -}}  e {#- f -#} g
  {% if true %}  
  x  
  {% endif %}  
  {# note #}
  {{ 'y' }}
    {%+ if true %}z{% endif +%}
 w {% if t == 'no' %}1{% elif 0 %}2{% elif t %}3{% else %}4{% endif %}""".replace("\\\\", "\\").replace("{{ 1e }}", "").split("\n{")
EXPRESSIONS = [part if number == 0 else "{" + part for number, part in enumerate(EXPRESSIONS)]


def marked(form):
    return FORMS[form].replace("«", "{% generation %}").replace("»", "{% endgeneration %}")


def plain(form):
    return FORMS[form].replace("«", "").replace("»", "")
