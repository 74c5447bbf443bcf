"""Which part of a model each worker gets: shares that fit together, even stages, refusals."""

from itertools import product

import pytest
import torch

from headrace.configs.errors import ConfigurationError
from headrace.configs.model_files.hf_config import normalize_hf_config
from headrace.configs.model_files.weight_layout import weight_layout
from headrace.workers.distributed import Place
from headrace.workers.models.decoder_config import DecoderConfig, llama_config
from headrace.workers.models.sharding import ModelPart, even_partition, part_of, weight_shares
from headrace.workers.share import Share

SIZES = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 200, "hidden_size": 48,
    "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 12,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
    "attention_bias": True, "mlp_bias": True,
}  # fmt: skip


def hf_config(**changes: object) -> dict[str, object]:
    return normalize_hf_config({**SIZES, **changes}, "test")


def decoder(**changes: object) -> DecoderConfig:
    return llama_config(hf_config(**changes))


def parts(config: DecoderConfig, tensor: int, pipeline: int) -> list[ModelPart]:
    return [part_of(config, Place(rank, tensor, pipeline)) for rank in range(tensor * pipeline)]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 3), (2, 2), (4, 2), (6, 1)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_shares_are_the_whole_model(tensor: int, pipeline: int, is_tied: bool) -> None:
    """Every element is on one shard of one stage, but for what several need."""
    changes = {"tie_word_embeddings": is_tied}
    layout = weight_layout(hf_config(**changes))
    counts = {name: torch.zeros(spec.shape, dtype=torch.int64) for name, spec in layout.items()}
    for part in parts(decoder(**changes), tensor, pipeline):
        for name, share in weight_shares(part).items():
            if name in counts:  # the others are of biases and norms that this model lacks
                (counts[name] if share is None else share.of(counts[name])).add_(1)
    kv_copies = max(1, tensor // 2)
    for name, count in counts.items():
        expected = 1
        if "k_proj" in name or "v_proj" in name:
            expected = kv_copies
        elif "norm" in name and "layers" in name:
            expected = tensor
        elif name == "model.norm.weight":
            expected = tensor  # of the last stage
        elif name == "model.embed_tokens.weight" and is_tied and pipeline > 1:
            expected = 2  # to look up, and as the head
        assert (count == expected).all(), name


def test_query_heads_meet_their_key_heads() -> None:
    """Each shard has the key and value heads that its query heads use."""
    config = decoder()
    per_kv_head = config.attention.num_heads // config.attention.num_kv_heads
    for tensor in (1, 2, 4, 6, 12):
        for part in parts(config, tensor, 1):
            shares = weight_shares(part)
            query, key = (shares[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qk")
            if tensor == 1:
                continue
            assert isinstance(query, Share) and isinstance(key, Share)
            first, last = query.start // 4, (query.start + query.length) // 4 - 1
            assert key.start // 4 == first // per_kv_head
            assert (key.start + key.length) // 4 - 1 == last // per_kv_head
            assert part.config.attention.num_heads == last - first + 1


@pytest.mark.parametrize(
    ("changes", "tensor", "message"),
    [
        ({}, 5, "tensor_parallel_size 5 does not divide the model's 12 query heads; use 1 or 2"),
        ({"intermediate_size": 90}, 4, "4 does not divide the model's 90 inner values"),
        ({"num_key_value_heads": 4}, 6, "neither divides nor is a multiple of the model's 4 key"),
    ],
)
def test_what_cannot_be_divided(changes: dict[str, object], tensor: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        part_of(decoder(**changes), Place(0, tensor, 1))


def test_vocabulary() -> None:
    for vocab, tensor in product((1, 31, 32, 200, 49152), (1, 2, 4)):
        ranges = [part.vocab for part in parts(decoder(vocab_size=vocab), tensor, 1)]
        assert [i for ids in ranges for i in ids] == list(range(vocab))
        widest = part_of(decoder(vocab_size=vocab), Place(0, tensor, 1)).widest_vocab
        assert max(map(len, ranges)) == len(widest)


def test_stages_are_even() -> None:
    config = decoder(num_hidden_layers=30, vocab_size=4)
    assert even_partition(config, 1) == [30]
    assert even_partition(config, 4) == [8, 8, 7, 7]
    headed = decoder(num_hidden_layers=30, vocab_size=4000)  # a head of nine layers' size
    counts = even_partition(headed, 2)
    assert sum(counts) == 30 and counts[0] - counts[1] in range(7, 11)
    assert even_partition(decoder(num_hidden_layers=2, vocab_size=10**6), 2) == [1, 1]
    with pytest.raises(ConfigurationError, match="6 is above the model's 5 layers"):
        even_partition(decoder(), 6)


def test_stages_as_asked_for() -> None:
    config = decoder()
    stages = [part_of(config, Place(rank, 1, 2), (1, 4)).layers for rank in range(2)]
    assert stages == [range(1), range(1, 5)]
    for wrong in ((2, 2), (5, 0), (2, 2, 1)):
        with pytest.raises(ConfigurationError, match="2 numbers of layers"):
            part_of(config, Place(0, 1, 2), wrong)
