"""Which part of a model a worker has: some layers, and a share of the matrices in them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.configs.model_division import check_shards, check_stages
from headrace.workers.distributed.place import Place
from headrace.workers.models.decoder_config import DecoderConfig
from headrace.workers.share import Share

_VOCAB_ALIGNMENT = 32  # rows of a packed matrix that are kept together


@dataclass(frozen=True)
class ModelPart:
    """A worker's part of `whole`. `config` is that of a decoder of this part's size.

    Its `layers` are those of the stage, its heads, inner size and `vocab` those of the shard.
    """

    whole: DecoderConfig
    config: DecoderConfig
    place: Place
    layers: range
    vocab: range  # token ids whose embedding and logits this part has

    @property
    def widest_vocab(self) -> range:
        """The token ids of the first shard; none has more of them."""
        return _vocab_share(self.whole.vocab_size, self.place, 0)

    @property
    def has_embedding(self) -> bool:
        """Whether it has the embedding's matrix: for looking tokens up, or as the head."""
        place = self.place
        return place.is_first_stage or (place.is_last_stage and self.whole.is_head_tied)

    @property
    def has_head(self) -> bool:
        """Whether it has a head that is a matrix of its own."""
        return self.place.is_last_stage and not self.whole.is_head_tied


def whole_model(config: DecoderConfig) -> ModelPart:
    """All of a model."""
    return ModelPart(config, config, Place(), range(len(config.layers)), range(config.vocab_size))


def part_of(
    config: DecoderConfig, place: Place, partition: Sequence[int] | None = None
) -> ModelPart:
    """The part of the worker at `place`.

    `partition`: layers of each stage; None: as even as their parameters allow. Raises
    ConfigurationError for a model that cannot be cut like that.
    """
    if place.world_size == 1:
        return whole_model(config)
    size, attention = place.tensor_parallel_size, config.attention
    kv_heads = attention.num_kv_heads
    check_shards(size, attention.num_heads, kv_heads, config.inner_size)
    layers = _stage_layers(config, place, partition)
    own = replace(
        config,
        layers=config.layers[layers.start : layers.stop],
        inner_size=config.inner_size // size,
        attention=replace(
            attention,
            num_heads=attention.num_heads // size,
            num_kv_heads=max(1, kv_heads // size),
        ),
    )
    return ModelPart(
        config, own, place, layers, _vocab_share(config.vocab_size, place, place.shard)
    )


def weight_shares(part: ModelPart) -> dict[str, Share | None]:
    """The checkpoint's weights that a part has, and its share of each; None: all of it.

    Query heads are cut evenly. Where there are more shards than key and value heads, several have
    the same. What a row-parallel product adds as its bias, the first shard alone adds.
    """
    shares: dict[str, Share | None] = {}
    vocab = Share(0, part.vocab.start, len(part.vocab))
    if part.has_embedding:
        shares["model.embed_tokens.weight"] = vocab
    if part.has_head:
        shares["lm_head.weight"] = vocab
    if part.place.is_last_stage:
        shares["model.norm.weight"] = None
    for layer in part.layers:
        for name, share in _layer_shares(part).items():
            shares[f"model.layers.{layer}.{name}"] = share
    return shares


def _layer_shares(part: ModelPart) -> dict[str, Share | None]:
    """Of one layer's weights and biases, whether it has them or not."""
    attention, shard = part.config.attention, part.place.shard
    heads, head_dim = attention.num_heads, attention.head_dim
    first_kv = shard * part.whole.attention.num_kv_heads // part.place.tensor_parallel_size
    query = Share(0, shard * heads * head_dim, heads * head_dim)
    key_value = Share(0, first_kv * head_dim, attention.num_kv_heads * head_dim)
    inner = Share(0, shard * part.config.inner_size, part.config.inner_size)
    rows = {
        "self_attn.q_proj": query,
        "self_attn.k_proj": key_value,
        "self_attn.v_proj": key_value,
        "mlp.gate_proj": inner,
        "mlp.up_proj": inner,
    }
    shares: dict[str, Share | None] = {}
    for name, share in rows.items():
        shares[f"{name}.weight"] = shares[f"{name}.bias"] = share
    for name, share in (("self_attn.o_proj", query), ("mlp.down_proj", inner)):
        shares[f"{name}.weight"] = replace(share, axis=1)
        if shard == 0:
            shares[f"{name}.bias"] = None
    for name in ("q_norm", "k_norm"):
        shares[f"self_attn.{name}.weight"] = None
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        shares[f"{name}_layernorm.weight"] = None
    return shares


def _vocab_share(size: int, place: Place, shard: int) -> range:
    per_shard = -(-size // place.tensor_parallel_size)
    if per_shard >= _VOCAB_ALIGNMENT:
        per_shard = -(-per_shard // _VOCAB_ALIGNMENT) * _VOCAB_ALIGNMENT
    return range(min(size, shard * per_shard), min(size, (shard + 1) * per_shard))


def _stage_layers(config: DecoderConfig, place: Place, partition: Sequence[int] | None) -> range:
    num_layers, num_stages = len(config.layers), place.pipeline_parallel_size
    if partition is None:
        partition = even_partition(config, num_stages)
    check_stages(num_stages, num_layers, partition)
    first = sum(partition[: place.stage])
    return range(first, first + partition[place.stage])


def even_partition(config: DecoderConfig, num_stages: int) -> list[int]:
    """Layers per stage so that the largest stage has as few parameters as can be.

    The first stage also has the embedding, which costs no time, so it does not count; the last one
    has the head.
    """
    num_layers = len(config.layers)
    if num_stages == 1:
        return [num_layers]
    check_stages(num_stages, num_layers, None)
    attention = config.attention
    heads = 2 * attention.num_heads + 2 * attention.num_kv_heads
    layer = config.hidden_size * (heads * attention.head_dim + 3 * config.inner_size)
    head_in_layers = config.hidden_size * config.vocab_size / layer
    # The last stage gives up whole layers for its head; the rest is spread evenly.
    share = (num_layers + head_in_layers) / num_stages
    last = max(1, round(share - head_in_layers))
    last = min(last, num_layers - (num_stages - 1))
    rest, others = num_layers - last, num_stages - 1
    return [rest // others + (i < rest % others) for i in range(others)] + [last]
