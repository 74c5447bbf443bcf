"""Models with quantized weights: what is loaded, how large it is, what comes out."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.configs.config import QuantizationMethod
from headrace.configs.model_files.model_info import read_model_info
from headrace.configs.quantization import INT8
from headrace.kernels.native import FORMATS, Format, NativeKernels, PackedMatrix, load_kernels
from headrace.workers.layers.weight_slot import PackedSlot
from headrace.workers.models import Decoder, build_model, load_weights
from headrace.workers.models.native_decoder import NativeDecoder
from headrace.workers.weight_formats import WeightFormats
from headrace.workers.weight_loader import iter_weights, rounded_to_int8, stored_types
from tests.kernels.native_ops import available_isas
from tests.workers.test_models import prompt_logits
from tests.workers.test_native_decoder import assert_invariant
from tests.workers.tiny_gguf import BLOCK_TYPES, SIZES, write_llama
from tests.workers.tiny_models import MAX_MODEL_LEN, make_reference

needs_kernels = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
# A layer of each type; then what needs more: several matrices, one in numbers, a fallback.
MIXED = {"": "Q4_K", "attn_v": "Q6_K", "attn_output": "F16", "ffn_down": "Q5_K"}
SANDWICHED = {"": "Q5_0", "attn_k": "Q8_0", "ffn_up": "Q4_0"}
PARTLY_NUMBERS = {"": "Q4_0", "attn_k": "F32"}
LAYERS = [*({"": name} for name in BLOCK_TYPES), MIXED, SANDWICHED, PARTLY_NUMBERS]


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    return write_llama(path, LAYERS, embedding="Q4_K", head="Q6_K")


@pytest.fixture(scope="module", params=available_isas())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    loaded = load_kernels(request.param, 2)
    assert loaded is not None
    return loaded


def make_model(
    path: Path,
    method: QuantizationMethod,
    kernels: NativeKernels | None,
    dtype: torch.dtype = torch.bfloat16,
) -> Decoder:
    info = read_model_info(path)
    formats = WeightFormats(method, stored_types(path) if method == "gguf" else {})
    model = build_model(info.architecture, info.hf_config, dtype, "test", kernels, formats)
    expected_bytes = model.num_weight_bytes
    model.allocate(MAX_MODEL_LEN)
    assert model.num_weight_bytes == expected_bytes
    weights = iter_weights(path, info.hf_config, dtype, model.stored_matrices)
    if kernels is None and method == INT8:
        weights = rounded_to_int8(weights, model.stored_matrices, dtype)
    with torch.inference_mode():
        load_weights(model, weights, "test")
    return model


def packed_rows(slot: PackedSlot) -> torch.Tensor:
    """What a part of a packed matrix holds, in bf16."""
    matrix: PackedMatrix = slot.matrix
    ids = torch.arange(slot.first_row, slot.first_row + slot.num_rows)
    if matrix.is_gated:  # 16 rows of the gate, 16 rows of up, ...
        half = matrix.num_outputs // 2
        is_up = slot.first_row >= half
        ids = ids - half if is_up else ids
        ids = ids // 16 * 32 + ids % 16 + 16 * is_up
    return matrix.lookup(ids, torch.bfloat16)


def assert_holds(model: Decoder, expected: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Every matrix has these values, rounded to bf16, whatever it is kept in."""
    slots = model.weight_slots()
    num_packed = 0
    for name, weight in expected:
        slot = slots[name]
        if isinstance(slot, PackedSlot):
            assert torch.equal(packed_rows(slot), weight.bfloat16()), name
            num_packed += 1
    assert num_packed >= 7 * len(model.layers) + 1


@needs_kernels
def test_a_file_is_kept_as_it_is(gguf_path: Path, kernels: NativeKernels) -> None:
    model = make_model(gguf_path, "gguf", kernels)
    assert isinstance(model, NativeDecoder)
    info = read_model_info(gguf_path)
    assert_holds(model, iter_weights(gguf_path, info.hf_config, torch.float32))  # type: ignore[arg-type]
    counts = model.matrix_formats.counts
    assert set(counts) == {*BLOCK_TYPES, "BF16"} and counts.total() == 7 * len(LAYERS) + 2
    # Of MIXED the output; of SANDWICHED gate and up; of PARTLY_NUMBERS k.
    assert counts["BF16"] == 1 + 2 + 1
    prefix = f"model.layers.{LAYERS.index(SANDWICHED)}.mlp."
    unsupported = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    assert model.matrix_formats.unsupported == unsupported
    shapes = [
        [(matrix.format.name, matrix.num_outputs) for matrix in layer.attention.qkv.packed]
        for layer in model._layers()
    ]
    assert shapes[0] == [("Q8_0", 512)]
    assert shapes[-3] == [("Q4_K", 384), ("Q6_K", 128)]
    assert shapes[-2] == [("Q5_0", 256), ("Q8_0", 128), ("Q5_0", 128)]
    assert shapes[-1] == [("Q4_0", 256), ("BF16", 128), ("Q4_0", 128)]
    assert [matrix.format for matrix in model.embedding.packed] == [Format.Q4_K]


@needs_kernels
def test_sizes_are_those_of_the_file(gguf_path: Path, kernels: NativeKernels) -> None:
    """Packing adds nothing but what fills up blocks of 32 rows, here none, and the fallbacks."""
    path = write_llama(gguf_path.parent / "plain.gguf", [{"": "Q4_1"}] * 2)
    model = make_model(path, "gguf", kernels)
    assert path.stat().st_size == pytest.approx(model.num_weight_bytes, rel=0.01)
    described = model.matrix_formats.describe(model.num_weight_bytes)
    assert described == "weights: 0.7 MiB, gguf (Q4_1 14, Q8_0 1)"


@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS)
def test_logits_of_a_file(gguf_path: Path, kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Near those of the dequantized weights: inputs of products are rounded to 8 bits."""
    token_ids = [(7 * i) % SIZES["vocab_size"] for i in range(100)]
    expected = prompt_logits(
        make_model(gguf_path, "none", None, torch.float32), token_ids, 100
    ).log_softmax(-1)
    model = make_model(gguf_path, "gguf", kernels, dtype)
    assert isinstance(model, NativeDecoder)
    whole = prompt_logits(model, token_ids, 100)
    divergence = (expected.exp() * (expected - whole.log_softmax(-1))).sum(-1)
    assert expected.std() > 0.5  # the comparison means something
    assert divergence.mean() < 0.01  # of bf16 alone: 0.002
    for chunk in (1, 3, 17, 64):
        assert torch.equal(prompt_logits(model, token_ids, chunk), whole)


@needs_kernels
def test_a_file_is_the_same_in_any_batch(gguf_path: Path, kernels: NativeKernels) -> None:
    assert_invariant(lambda kernels: make_model(gguf_path, "gguf", kernels), kernels)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_torch_computes_with_dequantized_weights(gguf_path: Path, dtype: torch.dtype) -> None:
    token_ids = [(7 * i) % SIZES["vocab_size"] for i in range(30)]
    quantized = make_model(gguf_path, "gguf", None, dtype)
    plain = make_model(gguf_path, "none", None, dtype)
    assert quantized.num_weight_bytes == plain.num_weight_bytes
    assert torch.equal(prompt_logits(quantized, token_ids, 30), prompt_logits(plain, token_ids, 30))


@pytest.fixture(scope="module", params=("gguf", "float32", "float16", "bfloat16"))
def any_path(
    request: pytest.FixtureRequest, gguf_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A model in GGUF, and another one in safetensors of several types."""
    if request.param == "gguf":
        return gguf_path
    directory: Path = tmp_path_factory.mktemp(request.param)
    reference = make_reference("llama")
    reference.save_pretrained(directory)
    dtype = getattr(torch, request.param)
    state = {name: weight.to(dtype) for name, weight in reference.state_dict().items()}
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    return directory


@needs_kernels
def test_int8_is_the_same_on_torch(any_path: Path, kernels: NativeKernels) -> None:
    """Quantized from what the file has, not from what bf16 makes of it; the same values."""
    model, reference = (make_model(any_path, INT8, k) for k in (kernels, None))
    assert isinstance(model, NativeDecoder) and not isinstance(reference, NativeDecoder)
    num_matrices = 7 * len(model.layers) + 1
    assert model.matrix_formats.counts == {"INT8": num_matrices}
    assert reference.matrix_formats.counts == {"bfloat16": num_matrices}
    assert model.stored_matrices == reference.stored_matrices
    assert not model.embedding.packed  # it is not the head
    info = read_model_info(any_path)
    stored = iter_weights(any_path, info.hf_config, torch.float32, model.stored_matrices)
    assert_holds(model, rounded_to_int8(stored, model.stored_matrices, torch.bfloat16))
    vocab_size = info.vocab_size
    token_ids = [(7 * i) % vocab_size for i in range(60)]
    expected = prompt_logits(reference, token_ids, 60).log_softmax(-1)
    result = prompt_logits(model, token_ids, 60).log_softmax(-1)
    assert (expected.exp() * (expected - result)).sum(-1).mean() < 0.01


def test_rounding_to_int8() -> None:
    weight = torch.tensor([[127.0, 1.0, -0.5], [0.0, 0.0, 0.0], [-254.0, 3.0, 5.0]])
    other = torch.full((2,), 0.3)
    weights = [("a.weight", weight), ("norm", other)]
    rounded = dict(rounded_to_int8(weights, {"a.weight"}, torch.float32))
    assert rounded["a.weight"].tolist() == [[127.0, 1.0, 0.0], [0, 0, 0], [-254.0, 4.0, 4.0]]
    assert rounded["norm"] is other
