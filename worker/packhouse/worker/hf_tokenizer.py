"""The job's tokenizer as transformers has it, for tokenize functions: made of its content, wherever that is."""

import json
from typing import Any

import tokenizers

from packhouse.worker.libraries import fast_tokenizer, template_globals
from packhouse.worker.renderers import pinned_clock
from packhouse.worker.tokenizer_content import TokenizerContent


def hugging_face(content: TokenizerContent, template: str | None, now: str | None) -> Any:
    """Return a ``PreTrainedTokenizerFast`` with that chat template, which is told the day ``now`` when it asks.

    Its ``template_date`` is ``now``.
    """
    if template is not None and now is not None:
        # transformers keeps compiled templates by their source: the day in it makes this one nobody else's.
        template = f"{{{{ '' if '{now}' }}}}{template}"
        template_globals(template).update(pinned_clock(now))
    backend = tokenizers.Tokenizer.from_str(json.dumps(content.backend))
    made = fast_tokenizer()(tokenizer_object=backend, chat_template=template, **content.special_tokens)
    made.template_date = now
    return made
