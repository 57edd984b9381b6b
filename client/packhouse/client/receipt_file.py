"""The receipt file: what a store knows of a shard. It is written last: a shard exists when its receipt does."""

from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa

from packhouse.client.digest import sealed, unsealed
from packhouse.client.errors import Damaged
from packhouse.client.format import FileInfo, Receipt, receipt_path
from packhouse.client.store import ReadStore


@dataclass(frozen=True, slots=True)
class ReceiptFile:
    """A receipt, and what stays beside the shard: manifests and plans know nothing of it."""

    receipt: Receipt
    sidecar: FileInfo | None = None
    """The quarantine sidecar, where records were rejected."""
    made_by: dict[str, Any] = field(default_factory=dict)
    """By what the shard was made; empty where that is not known."""

    def dump(self) -> bytes:
        """Return the file."""
        extra: dict[str, Any] = {"made_by": self.made_by} if self.made_by else {}
        if self.sidecar is not None:
            extra["sidecar"] = {"bytes": self.sidecar.bytes, "digest": self.sidecar.digest}
        return sealed(self.receipt.to_json() | extra)

    @classmethod
    def load(cls, data: bytes | pa.Buffer, key: str) -> Self:
        """Read the file of shard ``key``; raise ``Damaged`` unless it is that."""
        try:
            body = unsealed(bytes(data))
            made_by, sidecar = body.pop("made_by", {}), body.pop("sidecar", None)
            receipt = Receipt.from_json(body)
            if receipt.rejected and sidecar is None:
                raise ValueError("its records in quarantine are not stated")
            stored = cls(receipt, None if sidecar is None else FileInfo(**sidecar), made_by)
        except (ValueError, TypeError, KeyError) as error:
            raise Damaged(f"the receipt of shard {key} cannot be read ({error})", "run the job again") from error
        if receipt.key != key:
            raise Damaged(f"the receipt of shard {key} is that of {receipt.key}", "run the job again")
        return stored


def read_receipt(store: ReadStore, key: str) -> ReceiptFile:
    """Return the receipt file of a shard; raise ``NotFound`` or ``Damaged``."""
    return ReceiptFile.load(store.open(receipt_path(key)), key)
