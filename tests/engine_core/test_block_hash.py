"""Prefix-cache keys: the framing is unambiguous and every field counts."""

import hashlib
import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine_core.block_hash import block_hash, extend_hashes, root_hash

TEXTS = st.text(alphabet="ab\0\x01MWAS", max_size=6)
ROOTS = st.fixed_dictionaries(
    {
        "model_identity": TEXTS,
        "weight_version": TEXTS,
        "adapter_digest": st.none() | st.binary(max_size=4),
        "cache_salt": st.none() | TEXTS,
    }
)
BLOCKS = st.tuples(
    st.binary(max_size=4),
    st.lists(st.integers(0, 2), max_size=4),
    st.none() | st.binary(max_size=4),
)


@given(ROOTS, ROOTS)
def test_roots_differ_exactly_when_a_field_does(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (root_hash(**one) == root_hash(**other)) == (one == other)


@given(BLOCKS, BLOCKS)
def test_blocks_differ_exactly_when_a_field_does(one: Any, other: Any) -> None:
    assert (block_hash(*one) == block_hash(*other)) == (one == other)


def test_text_cannot_move_between_fields() -> None:
    def root(version: str, salt: str | None) -> bytes:
        return root_hash(model_identity="m", weight_version=version, cache_salt=salt)

    roots = [root("ab", "c"), root("a", "bc"), root("abc", ""), root("abc", None)]
    assert len(set(roots)) == 4
    # A salt that ends in the bytes of a token is not the shorter salt before that token.
    token = struct.pack("<Q", ord("b")).decode()
    keys = [block_hash(root("v", "a"), [ord("b")]), block_hash(root("v", "a" + token), [])]
    assert keys[0] != keys[1]


def test_keys_are_whole_sha256_digests() -> None:
    assert len(root_hash(model_identity="m", weight_version="v")) == hashlib.sha256().digest_size
    assert len(block_hash(b"p", [2**64 - 1])) == hashlib.sha256().digest_size


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 4), st.data())
def test_hashes_grow_with_the_tokens(tokens: list[int], block_size: int, data: Any) -> None:
    num_blocks = len(tokens) // block_size
    whole: list[bytes] = []
    extend_hashes(whole, b"root", tokens, block_size, num_blocks)
    parent = b"root"
    for index in range(num_blocks):
        parent = block_hash(parent, tokens[index * block_size : (index + 1) * block_size])
        assert whole[index] == parent
    parts: list[bytes] = []
    extend_hashes(parts, b"root", tokens, block_size, data.draw(st.integers(0, num_blocks)))
    extend_hashes(parts, b"root", tokens, block_size, num_blocks)
    assert parts == whole and len(set(whole)) == num_blocks


def test_equal_blocks_after_different_prefixes_have_different_keys() -> None:
    one: list[bytes] = []
    other: list[bytes] = []
    extend_hashes(one, b"root", [1, 1, 9, 9], 2, 2)
    extend_hashes(other, b"root", [2, 2, 9, 9], 2, 2)
    assert one[1] != other[1]
