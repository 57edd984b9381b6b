"""A tokenizer by content: loaded from its folder, and kept in the store under its digest."""

import json
import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

from packhouse.client.digest import canonical_json, digest_bytes
from packhouse.client.errors import Damaged, InvalidRequest, NotFound, Unavailable
from packhouse.client.store import ReadStore, Store
from packhouse.worker import roots
from packhouse.worker.libraries import auto_tokenizer
from packhouse.worker.named_templates import as_one


@dataclass(frozen=True)
class TokenizerContent:
    """A tokenizer by content: what its folder held when it was loaded, stripped of state left over from use."""

    backend: dict[str, Any]
    """tokenizer.json without truncation and padding."""
    special_tokens: dict[str, str]
    """Named special tokens: bos_token, eos_token, …"""

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of the content. The chat template is not in: it stands in the recipes that render by it."""
        return digest_bytes(self._dump())

    @cached_property
    def vocab_size(self) -> int:
        """One more than the greatest id, added tokens included."""
        vocab = self.backend["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
        return 1 + max([*ids, *(int(token["id"]) for token in self.backend["added_tokens"])])

    def _dump(self) -> bytes:
        return canonical_json({"backend": self.backend, "special_tokens": self.special_tokens})

    def save(self, store: Store) -> None:
        """Put the content into the store, where workers find it by digest."""
        path = tokenizer_path(self.digest)
        try:
            if digest_bytes(store.open(path)) == self.digest:
                return
        except NotFound:
            pass
        try:
            store.write(path, self._dump())
        except OSError as error:
            remedy = "free or repair it and submit the job again"
            raise Unavailable(f"the store cannot be written ({error.strerror})", remedy) from None

    @classmethod
    def load(cls, store: ReadStore, digest: str) -> Self:
        """Read what ``save`` wrote; raise ``Damaged`` unless it is the content with that digest."""
        data = store.open(tokenizer_path(digest))
        if digest_bytes(data) != digest:
            raise Damaged(f"the stored tokenizer {digest} is not what was stored", "submit the job again")
        return cls(**json.loads(bytes(data)))


def tokenizer_path(digest: str) -> str:
    """Return the store key of a tokenizer's content."""
    return f"tokenizers/{digest}.json"


def special_id(content: TokenizerContent, name: str) -> int:
    """Return the id of the ``bos`` or ``eos`` token; raise ``InvalidRequest`` where there is none."""
    token = content.special_tokens.get(f"{name}_token")
    added = {item["content"]: int(item["id"]) for item in content.backend["added_tokens"]}
    vocab = content.backend["model"]["vocab"]
    found = added.get(token or "", vocab.get(token) if isinstance(vocab, dict) else None)
    if found is None:
        raise InvalidRequest(f"the tokenizer has no {name} token", f"set add_{name} to false")
    return int(found)


def load_tokenizer(folder: str) -> tuple[TokenizerContent, str | None]:
    """Load the tokenizer in ``folder``; return its content and its chat template, if it has one.

    Raises ``InvalidRequest`` at once for a name that is not a folder: a model hub is never asked.
    """
    if os.path.isabs(folder):
        roots.check(folder)
    if not os.path.isabs(folder) or not os.path.isdir(folder):
        detail = f"the tokenizer {folder!r} is not a folder on the service's machine"
        raise InvalidRequest(detail, "give the absolute path of one with a tokenizer.json; hub names are not fetched")
    signature = []
    try:
        for path in _files(Path(folder)):
            roots.check(str(path))
            info = path.stat()
            signature.append(
                (str(path.relative_to(folder)), info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
            )
    except OSError as error:
        detail = f"the tokenizer in {folder!r} cannot be read ({error.strerror}: {error.filename!r})"
        raise InvalidRequest(detail, "check the folder") from None
    return _load_tokenizer(folder, tuple(signature))


def _files(folder: Path) -> list[Path]:
    """Return all that transformers may read: what lies in the folder, and its named templates one below."""
    return sorted([*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")])


@lru_cache(maxsize=16)
def _load_tokenizer(folder: str, signature: tuple[Any, ...]) -> tuple[TokenizerContent, str | None]:
    names = {entry[0] for entry in signature}
    if not names & {"tokenizer.json", "tokenizer.model", "vocab.json"}:
        raise InvalidRequest(f"the folder {folder!r} has no tokenizer.json", "save the tokenizer there first")
    loader = auto_tokenizer()
    try:
        tokenizer = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # the loaders raise anything, bare Exception included
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        detail = f"the tokenizer in {folder!r} cannot be loaded ({reason})"
        raise InvalidRequest(detail, "check that AutoTokenizer loads it without remote code") from None
    backend["truncation"] = backend["padding"] = None
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    if getattr(tokenizer, "split_special_tokens", False):
        detail = f"the tokenizer in {folder!r} has split_special_tokens set: those of a template would be text"
        remedy = "set it to false in tokenizer_config.json; what those in records do is said by control_tokens"
        raise InvalidRequest(detail, remedy)
    return TokenizerContent(backend, dict(sorted(special.items()))), as_one(tokenizer.chat_template)
