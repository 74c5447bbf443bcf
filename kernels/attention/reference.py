"""Paged attention in torch: softmax(scale * q k^T) v, causal, grouped heads, optional window.

K and V of the new tokens are written to the pages first and always read back from them, in their
dtype, so that a token attends to the same values whether it was prefilled whole, in chunks, or
after a cache hit. Masked probabilities are exactly 0, and no slot outside a sequence's own visible
tokens is ever read: what lies there, NaN included, has no effect. Only whole pages of a request
with non-finite values need to be zeroed before their next use.
"""

import torch
from torch.nn import functional

from headrace.kernels.attention.metadata import AttentionMetadata


def paged_attention(
    query: torch.Tensor,
    key_value: torch.Tensor,
    pages: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Write the new K and V to `pages`, then attend.

    Returns [num_tokens, num_heads, head_dim], the dtype of `query`.

    query: [num_tokens, num_heads, head_dim]; key_value: [num_tokens, 2, num_kv_heads, head_dim],
    rotary embedding already applied to K; pages: [num_blocks * 2 * block_size, num_kv_heads *
    head_dim], the rows of `metadata`. `soft_cap` c bounds the scores: c * tanh(score / c).
    """
    num_kv_heads, head_dim = key_value.shape[2:]
    new = key_value.reshape(-1, num_kv_heads * head_dim)
    pages.index_copy_(0, metadata.write_rows, new)
    outputs = []
    for rows in metadata.decodes:
        kv = _gather(pages, rows.gather_rows, metadata.scratch)
        kv = kv.view(2, rows.end - rows.start, rows.length, num_kv_heads, head_dim)
        # The query heads that share a K and V head are that head's rows.
        q = query[rows.start : rows.end].unflatten(1, (num_kv_heads, -1))
        k, v = kv[0].transpose(1, 2), kv[1].transpose(1, 2)
        outputs.append(_attend(q, k, v, rows.mask, scale, soft_cap).flatten(1, 2))
    for chunk in metadata.prefills:
        kv = _gather(pages, chunk.gather_rows, metadata.scratch)
        kv = kv.view(2, 1, chunk.length, num_kv_heads, head_dim).transpose(2, 3)
        q = query[chunk.start : chunk.end].transpose(0, 1).unsqueeze(0)
        for low, high, seen_from, seen_to in chunk.tiles:
            k, v = kv[0, :, :, seen_from:seen_to], kv[1, :, :, seen_from:seen_to]
            assert metadata.corner_mask is not None
            mask = metadata.corner_mask[low - high :, seen_from - seen_to :]
            out = _attend(q[:, :, low:high], k, v, mask, scale, soft_cap)
            outputs.append(out[0].transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _gather(pages: torch.Tensor, rows: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """The K and V rows, in scratch memory: fresh memory would cost a page fault per 4 KiB."""
    return torch.index_select(pages, 0, rows, out=scratch[: rows.shape[0]])


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attention of [batch, heads, queries, head_dim] to [batch, kv_heads, tokens, head_dim].

    Heads may be grouped.
    """
    is_grouped = query.shape[1] != key.shape[1]
    if soft_cap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=is_grouped
        )
    if is_grouped:
        copies = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scale
    scores = torch.tanh(scores / soft_cap) * soft_cap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(-1), value.float()).to(query.dtype)
