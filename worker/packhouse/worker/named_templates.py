"""Named chat templates: a tokenizer may have one for conversations with tools beside the default one."""

from collections.abc import Mapping

from packhouse.client.errors import InvalidRequest
from packhouse.worker.renderers import has_generation


def as_one(templates: str | Mapping[str, str] | None) -> str | None:
    """Return one template that does what transformers does with several, or None where there is no default.

    With tools a record is rendered by the template ``tool_use`` if there is one, else by ``default``; others are only
    used by who asks for them. Raises ``InvalidRequest`` where one of the two marks the assistant's words and the other
    does not.
    """
    if templates is None or isinstance(templates, str):
        return templates
    plain, tools = templates.get("default"), templates.get("tool_use")
    if plain is None or tools is None:
        return plain
    if has_generation(plain) != has_generation(tools):
        detail = "of the tokenizer's chat templates 'default' and 'tool_use' only one has {% generation %} tags"
        raise InvalidRequest(detail, "give one text as 'template'")
    # Jinja takes a template's last line end away, and the plus signs keep it from touching what is around the tags.
    pieces = [source.removesuffix("\n") for source in (tools, plain)]
    return f"{{% if tools is not none +%}}{pieces[0]}{{%+ else +%}}{pieces[1]}{{%+ endif %}}"
