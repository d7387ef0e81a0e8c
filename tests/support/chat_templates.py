"""Chat templates written for the tests, with the habits of published ones."""

CHATML = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# A reasoning model's template with the usual habits: tools in the system turn, tool results inside a user
# turn, reasoning of earlier turns dropped, thinking opened in the prompt or answered with an empty thought.
THINKING = """
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content | trim + '\n' }}
    {%- endif %}
    {%- if reasoning_effort is defined %}
        {{- 'Effort: ' ~ reasoning_effort ~ '\n' }}
    {%- endif %}
    {%- for tool in tools or [] %}
        {{- tool | tojson ~ '\n' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- set state = namespace(last_user=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set state.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set thought = m.reasoning_content | default('') %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > state.last_user and thought %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>\n<function=' ~ call.function.name ~ '>\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<' ~ name ~ '>' ~ value ~ '</' ~ name ~ '>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<think>\n' }}
    {%- endif %}
{%- endif %}
"""

STRICT = """
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate, found ' + m.role) }}
    {%- endif %}
    {{- m.content }}
{%- endfor %}
"""

TOOLS = "{%- for tool in tools %}{{- tool | tojson(indent=2) }}{%- endfor %}"
