"""Every model family against transformers in float32, on tiny random weights."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.configs.errors import ModelFileError
from headrace.kernels.attention import AttentionPlanner, SequenceSlots, block_slots
from headrace.workers.kv_cache import KVCache, make_kv_cache_spec
from headrace.workers.models import Decoder, build_model, load_weights
from headrace.workers.protocol import BlockCopy
from tests.workers.tiny_models import (
    MAX_MODEL_LEN,
    MODEL_NAMES,
    VOCAB_SIZE,
    make_decoder,
    make_kv_cache,
    make_reference,
    reference_logits,
)

BLOCK_SIZE = 16
PROMPT_LEN = 100  # several times the windows of the tiny models


def prompt_logits(
    model: Decoder, token_ids: list[int], chunk: int, cache_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Logits of the whole prompt, computed in chunks; every group has blocks of its own."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    num_groups = len(make_kv_cache(model, 2).spec.groups)
    cache = make_kv_cache(model, 1 + num_blocks * num_groups, dtype=cache_dtype)
    ids = torch.randperm(num_blocks * num_groups) + 1
    slots = [block_slots(row, BLOCK_SIZE) for row in ids.view(num_groups, -1).tolist()]
    planners = model.planners(cache.spec)
    logits = []
    with torch.inference_mode():
        for start in range(0, len(token_ids), chunk):
            end = min(len(token_ids), start + chunk)
            plans = [
                planner.plan([SequenceSlots(slots[group][:end], end - start)])
                for group, planner in enumerate(planners)
            ]
            embedded = model.embed(torch.tensor(token_ids[start:end]))
            residual = model(embedded, torch.arange(start, end), cache, plans)
            logits.append(model.compute_logits(residual))
    return torch.cat(logits)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_prompt_logits_equal_transformers(name: str) -> None:
    reference = make_reference(name)
    model = make_decoder(reference)
    token_ids = torch.randint(0, VOCAB_SIZE, (PROMPT_LEN,)).tolist()
    expected = reference_logits(reference, token_ids)
    assert expected.std() > 0.3  # the comparison means something
    for chunk in (PROMPT_LEN, 17):
        result = prompt_logits(model, token_ids, chunk)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected, rtol=0.0, atol=5e-5)


def test_window_changes_the_result() -> None:
    """The tests above would not notice a window that is ignored on both sides."""
    reference = make_reference("mistral")
    token_ids = torch.randint(0, VOCAB_SIZE, (60,)).tolist()
    changed = [(token_ids[0] + 1) % VOCAB_SIZE, *token_ids[1:]]
    model = make_decoder(reference)
    first, second = (prompt_logits(model, ids, 60) for ids in (token_ids, changed))
    reach = 3 * 19  # layers x (window - 1)
    assert not torch.equal(first[:20], second[:20])
    torch.testing.assert_close(first[reach + 1 :], second[reach + 1 :], rtol=0.0, atol=1e-5)


def test_older_config_spelling() -> None:
    reference = make_reference("llama-3-rope")
    config = reference.config.to_dict()
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type" if k == "rope_type" else k: v for k, v in rope.items()}
    model = build_model("LlamaForCausalLM", config, torch.float32, "test")
    model.allocate(MAX_MODEL_LEN)
    load_weights(model, reference.state_dict().items(), "test")
    token_ids = torch.randint(0, VOCAB_SIZE, (90,)).tolist()
    torch.testing.assert_close(
        prompt_logits(model, token_ids, 90),
        reference_logits(reference, token_ids),
        rtol=0.0,
        atol=5e-5,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(dtype: torch.dtype) -> None:
    reference = make_reference("gemma3")
    model = build_model("Gemma3ForCausalLM", reference.config.to_dict(), dtype, "test")
    model.allocate(MAX_MODEL_LEN)
    weights = {k: v.to(dtype) for k, v in reference.state_dict().items()}
    load_weights(model, weights.items(), "test")
    assert model.num_weight_bytes < 2.2 * sum(p.numel() for p in reference.parameters())
    num_blocks = 1 + 7 * len(make_kv_cache(model, 2).spec.groups)
    cache = make_kv_cache(model, num_blocks)
    assert cache.pool.dtype == dtype
    token_ids = torch.randint(0, VOCAB_SIZE, (40,)).tolist()
    planners = [
        AttentionPlanner(BLOCK_SIZE, 2, 8, dtype, group.window) for group in cache.spec.groups
    ]
    plans = [
        planner.plan([SequenceSlots(block_slots(range(1 + 3 * i, 4 + 3 * i), BLOCK_SIZE)[:40], 40)])
        for i, planner in enumerate(planners)
    ]
    with torch.inference_mode():
        residual = model(model.embed(torch.tensor(token_ids)), torch.arange(40), cache, plans)
        logits = model.compute_logits(residual)
    assert residual.dtype == dtype
    expected = reference_logits(reference, token_ids)
    assert (logits - expected).abs().mean() < 0.1 * expected.std()


@pytest.fixture
def llama() -> Any:
    return make_reference("llama")


def load(reference: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    model = build_model("LlamaForCausalLM", reference.config.to_dict(), torch.float32, "m")
    model.allocate(8)
    load_weights(model, weights, "m")


def test_missing_tensors_are_named(llama: Any) -> None:
    weights = {k: v for k, v in llama.state_dict().items() if "layers.1.mlp.up" not in k}
    with pytest.raises(
        ModelFileError, match=r"m: 1 of .* missing: model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load(llama, iter(weights.items()))


def test_unexpected_and_repeated_tensors_are_named(llama: Any) -> None:
    extra = {"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(ModelFileError, match=r"unexpected tensor model\.layers\.9"):
        load(llama, iter((llama.state_dict() | extra).items()))
    items = list(llama.state_dict().items())
    with pytest.raises(ModelFileError, match="comes twice"):
        load(llama, iter([*items, items[0]]))


def test_wrong_shapes_are_named(llama: Any) -> None:
    changed = {"model.layers.0.self_attn.k_proj.weight": torch.zeros(3, 48)}
    with pytest.raises(ModelFileError, match=r"k_proj.weight has shape \[3, 48\].*\[16, 48\]"):
        load(llama, iter((llama.state_dict() | changed).items()))


def test_tied_head_and_saved_buffers_are_ignored() -> None:
    reference = make_reference("llama-tied")
    extra = {
        "lm_head.weight": torch.zeros(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    load(reference, iter((reference.state_dict() | extra).items()))


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("MambaForCausalLM", {}, "architecture MambaForCausalLM; supported: LlamaForCausalLM"),
        ("LlamaForCausalLM", {"hidden_act": "relu2"}, "hidden_act 'relu2'"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "llama3"}}, "factor"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_unsupported_configs_are_refused(
    architecture: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        build_model(architecture, change, torch.float32, "some/model")


def test_building_takes_no_memory() -> None:
    model = build_model("LlamaForCausalLM", {"num_hidden_layers": 80}, torch.float32, "huge")
    assert model.num_weight_bytes > 60e9
    assert all(parameter.is_meta for parameter in model.parameters())


def test_kv_groups() -> None:
    def groups(windows: list[int | None]) -> list[tuple[str, int | None, tuple[int, ...]]]:
        spec = make_kv_cache_spec(windows, 16, 1, 8, torch.float32)
        return [(group.kind, group.window, group.layer_indices) for group in spec.groups]

    assert groups([None] * 3) == [("full", None, (0, 1, 2))]
    assert groups([9] * 3) == [("sliding", 9, (0, 1, 2))]
    hybrid: list[int | None] = [9, 9, None, 9, 9, None, 9]
    assert groups(hybrid) == [
        ("full", None, (2, 5)),
        ("sliding", 9, (0, 1)),
        ("sliding", 9, (3, 4)),
        ("sliding", 9, (6,)),
    ]


def test_cache_copies_and_zeroes_whole_blocks_in_every_buffer() -> None:
    spec = make_kv_cache_spec([None, None], 4, 1, 8, torch.float32)
    cache = KVCache(spec, 6, torch.float32)
    assert spec.num_buffers == 2
    assert not cache.pool.any()
    cache.toucher.start()
    cache.layer_pages[0][:] = 1.0
    cache.pool[1, 3] = torch.nan
    assert cache.toucher.wait(10.0)
    assert (cache.layer_pages[0] == 1.0).all()  # touching pages changed nothing
    cache.pool[0, 2] = 7.0
    cache.copy_blocks([BlockCopy(2, 5), BlockCopy(5, 4)])
    assert (cache.pool[0, 5] == 7.0).all()
    assert (cache.pool[0, 4] == 1.0).all()  # all sources are read first
    cache.zero_blocks([3, 2])
    assert not cache.pool[:, 2:4].any()
    cache.close()
