"""Keys of the prefix cache: chained SHA-256 over tagged, length-framed fields.

A block's key covers everything its KV depends on: through the root, the model and its weights, the
adapter and the tenant's salt; through the parent, all tokens before it; its own tokens and media.
Every field is framed as tag, presence, length, bytes, so that two different tuples of fields never
give the same input to the hash.
"""

import hashlib
import struct
from collections.abc import Sequence

_DOMAIN = b"headrace.kv.1"


def root_hash(
    *,
    model_identity: str,
    weight_version: str,
    adapter_digest: bytes | None = None,
    cache_salt: str | None = None,
) -> bytes:
    """The parent of a request's first block, 32 bytes."""
    return hashlib.sha256(
        _frame(b"D", _DOMAIN)
        + _frame(b"M", _encode(model_identity))
        + _frame(b"W", _encode(weight_version))
        + _frame(b"A", adapter_digest)
        + _frame(b"S", None if cache_salt is None else _encode(cache_salt))
    ).digest()


def block_hash(parent: bytes, token_ids: Sequence[int], media_digest: bytes | None = None) -> bytes:
    """The key of a block that follows `parent`, 32 bytes. Token ids are in [0, 2**64)."""
    tokens = struct.pack(f"<{len(token_ids)}Q", *token_ids)
    return hashlib.sha256(
        _frame(b"P", parent) + _frame(b"T", tokens) + _frame(b"I", media_digest)
    ).digest()


def extend_hashes(
    hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, num_blocks: int
) -> None:
    """Append keys of leading full blocks of `token_ids` until `hashes` has `num_blocks`."""
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), num_blocks):
        parent = block_hash(parent, token_ids[index * block_size : (index + 1) * block_size])
        hashes.append(parent)


def _frame(tag: bytes, value: bytes | None) -> bytes:
    if value is None:
        return tag + b"\0"
    return tag + b"\1" + len(value).to_bytes(8, "little") + value


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
