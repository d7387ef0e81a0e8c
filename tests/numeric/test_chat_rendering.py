"""Chat templates render as in Hugging Face transformers, which they are written for."""

from typing import Any

import pytest

from gateway.chat_template import ChatTemplate
from gateway.tokenizer import Tokenizer
from tests.support.chat_templates import CHATML, THINKING, TOOLS
from tests.support.vocabulary import small_vocabulary

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "What is 6 * 7 < 50?\n\n"},
    {
        "role": "assistant",
        "content": "<think>\nuse the tool\n</think>\n\n",
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"a": 1.5, "b": "ä\n", "c": [None]}}}
        ],
    },
    {"role": "tool", "content": "42"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": 'Größe > 0 & "x"', "parameters": {}}}

DIALECT = """
{#- a comment -#}
  {% if tools %}
tools
  {% endif %}
{%- set ns = namespace(n=0) -%}
{% for m in messages if m.role != 'system' %}
  {%- generation %}{% set inner = 1 %}{{ m.content | trim | upper }}{% endgeneration %}
  {%- set ns.n = ns.n + 1 %} {{ inner is defined }} {{ loop.index }}/{{ loop.length }}
  {%- if ns.n == 2 %}{% break %}{% endif %}
{% endfor %}
{{ messages[1] | tojson(indent=2) }} {{ dict(a=1) }} {{ [1, 'é'] }} {{ 'a' ~ 1 ~ none }}
{{ missing is defined }}{{ missing }} {{ messages[0].missing }} {{ enable_thinking | default('unset') }}
{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }}
{{ messages | map(attribute='role') | join(', ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(small_vocabulary(), "small.gguf")


@pytest.mark.parametrize("template_kwargs", [{}, {"enable_thinking": False}, {"reasoning_effort": "low"}])
@pytest.mark.parametrize(
    "source", [CHATML, THINKING, TOOLS, DIALECT], ids=["chatml", "thinking", "tools", "dialect"]
)
def test_same_text(tokenizer: Tokenizer, source: str, template_kwargs: dict[str, Any]) -> None:
    """Blanks and newlines around blocks, undefined names, JSON: a character more is another prompt than the
    model was trained on."""
    reference = pytest.importorskip("transformers.utils.chat_template_utils", reason="the reference renderer")
    expected, _ = reference.render_jinja_template(
        [CHAT], tools=[TOOL], chat_template=source, add_generation_prompt=True, **template_kwargs
    )
    text = ChatTemplate(source, tokenizer).render(CHAT, tools=[TOOL], template_kwargs=template_kwargs)
    assert [text] == expected
