"""transformers, imported when it is first needed: by one thread at a time, because its lazy modules are not safe."""

import os
import threading
from collections.abc import Iterator
from typing import Any

_IMPORT = threading.Lock()


def auto_tokenizer() -> Any:
    """Return ``transformers.AutoTokenizer``; the first call takes seconds."""
    with _IMPORT:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoTokenizer

        return AutoTokenizer


def fast_tokenizer() -> Any:
    """Return ``transformers.PreTrainedTokenizerFast``."""
    with _IMPORT:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast


def chat_renderer() -> Any:
    """Return transformers' function that renders chats in its sandbox."""
    with _IMPORT:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers.utils.chat_template_utils import render_jinja_template

        return render_jinja_template


def template_globals(source: str) -> dict[str, Any]:
    """Return the globals of the compiled template that ``chat_renderer`` renders ``source`` by, to add to them."""
    with _IMPORT:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers.utils.chat_template_utils import _compile_jinja_template

        return _compile_jinja_template(source).globals  # type: ignore[no-any-return]


def template_tokens(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of each token of a template, as Jinja reads it; raise its ``TemplateSyntaxError``."""
    from jinja2 import Environment

    return Environment().lex(source)
