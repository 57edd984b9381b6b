"""Chat templates by name, for tokenizers that come without one; ``{% generation %}`` stands around what is trained."""

_CALLS = (
    "{% for call in message.tool_calls or [] %}{% set call = call.function or call %}"
    "{% if loop.first and message.content or not loop.first %}{{ '\\n' }}{% endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{ call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)

_CHATML_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
    "{{ '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n"
    "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n'
    "</tool_call><|im_end|>\\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{% endif %}"
)

_CHATML_TOOL = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)

_CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

_CHATML = (
    _CHATML_TOOLS + "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message.content }}" + _CALLS + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% elif message.role == 'tool' %}" + _CHATML_TOOL + "{% elif not (loop.first and message.role == 'system') %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
) + _CHATML_PROMPT

# A reasoning is written where it belongs to the answer of the last question; earlier ones are left out, as the model
# does not see them either.
_QWEN3 = (
    _CHATML_TOOLS + "{% set ns = namespace(last=messages | length - 1, found=false) %}"
    "{% for message in messages[::-1] %}{% if not ns.found and message.role == 'user' and message.content is string "
    "and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}"
    "{% set ns.last = messages | length - 1 - loop.index0 %}{% set ns.found = true %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}"
    "{% set content = message.content %}{% set reasoning = message.reasoning_content or '' %}"
    "{% if not reasoning and '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{% else %}{{ content }}{% endif %}"
    + _CALLS.replace("message.content or", "content or")
    + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% elif message.role == 'tool' %}"
    + _CHATML_TOOL
    + "{% elif not (loop.first and message.role == 'system') %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
) + _CHATML_PROMPT

_INTERNLM2 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    '{% set call = call.function or call %}{{ \'<|action_start|><|plugin|>\\n{"name": "\' + call.name }}'
    '{{ \'", "parameters": \' }}'
    "{{ call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}<|action_end|>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% elif message.role == 'tool' %}"
    "{{ '<|im_start|>environment name=<|plugin|>\\n' + message.content + '<|im_end|>\\n' }}{% else %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}"
    "{% if tools and (loop.first and message.role == 'system' or loop.first and messages[0].role != 'system') %}"
    "{{ '<|im_start|>system name=<|plugin|>\\n' }}{{ tools | tojson }}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
) + _CHATML_PROMPT

_LLAMA3_HEADER = "{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}"

_LLAMA3 = (
    "{{ bos_token }}{% set first = messages[0].content | trim if messages[0].role == 'system' else '' %}"
    "{% if tools or first %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' + first }}{% if tools %}"
    "{{ '\\n\\nYou have access to the following functions. To call one, respond with JSON for a function call: "
    '{"name": function name, "parameters": dictionary of argument name and its value}.\\n\' }}'
    "{% for tool in tools %}{{ '\\n' }}{{ tool | tojson(indent=4) }}{{ '\\n' }}{% endfor %}{% endif %}"
    "{{ '<|eot_id|>' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}{% set role = 'assistant' %}" + _LLAMA3_HEADER
) + (
    "{% generation %}{{ message.content | trim }}{% for call in message.tool_calls or [] %}"
    '{% set call = call.function or call %}{{ \'{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{ call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}' }}{% endfor %}"
    "{{ '<|eot_id|>' }}{% endgeneration %}{% elif not (loop.first and message.role == 'system') %}"
    "{% set role = 'ipython' if message.role == 'tool' else message.role %}"
    + _LLAMA3_HEADER
    + "{{ message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

_DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}{% endif %}"
    "{% endfor %}{% if tools %}{{ '\\n\\n## Tools\\n' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}"
    "{% endfor %}"
    "{% endif %}{% for message in messages %}{% if message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
    "{% elif message.role == 'assistant' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<｜Assistant｜>' }}{% endif %}{% generation %}{{ message.content }}{% if message.tool_calls %}"
    "{{ '<｜tool▁calls▁begin｜>' }}{% for call in message.tool_calls %}{% set call = call.function or call %}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name + '\\n```json\\n' }}"
    "{{ call.arguments if call.arguments is string else call.arguments | tojson }}"
    "{{ '\\n```<｜tool▁call▁end｜>' }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}{% endgeneration %}"
    "{% elif message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<｜tool▁outputs▁begin｜>' }}{% endif %}"
    "{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{% elif message.role != 'system' %}{{ raise_exception('a role other than system, user, assistant and tool') }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜>' }}{% endif %}"
)

BUILT_IN = {
    "internlm2": _INTERNLM2,
    "chatml": _CHATML,
    "llama3": _LLAMA3,
    "qwen3": _QWEN3,
    "deepseek": _DEEPSEEK,
}
"""By name. They write tools and tool calls as the families do."""
