import pytest
import torch

from headrace.kernels.rms_norm import rms_norm


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (17, 576), (2, 5, 100)])
def test_equals_the_formula(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5).double(), exact(x, weight, 1e-5), rtol=1e-5, atol=1e-6
    )


def test_bfloat16_is_rounded_once() -> None:
    x, weight = torch.randn(5, 100).bfloat16(), torch.randn(100)
    expected = exact(x, weight, 1e-6).bfloat16()
    result = rms_norm(x, weight, 1e-6)
    assert result.dtype == torch.bfloat16
    # float32 against float64 may fall on the other side of a rounding boundary now and then.
    assert (result != expected).float().mean() < 0.01
    torch.testing.assert_close(result, expected)


def test_one_weight_per_head() -> None:
    x, weight = torch.randn(4, 3, 16), torch.randn(3, 16)
    together = rms_norm(x, weight, 1e-6)
    for head in range(3):
        alone = rms_norm(x[:, head], weight[head], 1e-6)
        torch.testing.assert_close(together[:, head], alone)
