"""Matrix products by oneDNN: the same sums to rounding, forward and backward, only where they are large and float32."""

from types import SimpleNamespace

import pytest
import torch

from ln_probe.hooks import products

pytestmark = pytest.mark.skipif(products.product_of_onednn() is None, reason="this build of PyTorch has no oneDNN")


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the products that oneDNN was asked for."""
    seen, product = [], products._product

    def counted(left, right, *bias):
        seen.append((*left.shape, right.shape[1]))
        return product(left, right, *bias)

    monkeypatch.setattr(products, "_product", counted)
    return seen


def _error(found, left, right, bias=0.0):
    """In units of what rounding of a float32 sum allows."""
    exact = left.double() @ right.double() + bias
    allowed = torch.finfo(torch.float32).eps * left.shape[-1] * (left.abs().double() @ right.abs().double()).max()
    return float((found.double() - exact).abs().max() / allowed)


@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_equal_to_rounding(calls, transposed):
    torch.manual_seed(0)
    left, bias = torch.randn(120, 300), torch.randn(400)
    right = torch.randn(400, 300).T if transposed else torch.randn(300, 400)
    with products.OneDNN():
        plain, lifted, batched = left @ right, torch.addmm(bias, left, right), torch.bmm(left[None], right[None])
    assert calls == [(120, 300, 400)] * 3
    assert _error(plain, left, right) < 1
    assert _error(lifted, left, right, bias.double()) < 1
    assert _error(batched[0], left, right) < 1


def test_part_of_a_matrix_is_copied_for_many_rows_alone(calls):
    torch.manual_seed(2)
    part = torch.randn(300, 900)[:, 100:500]
    for rows, count in ((100, 0), (products._ROWS, 1)):
        left = torch.randn(rows, 300)
        with products.OneDNN():
            found = left @ part
        assert len(calls) == count
        assert _error(found, left, part) < 1


def test_gradients_pass_through_both_factors(calls):
    torch.manual_seed(1)
    left, right = torch.randn(200, 128, requires_grad=True), torch.randn(128, 256, requires_grad=True)
    weight = torch.randn(200, 256)
    with products.OneDNN():
        of_left, of_right = torch.autograd.grad(((left @ right) * weight).sum(), (left, right))
    assert len(calls) == 3
    assert _error(of_left, weight, right.T.detach()) < 1
    assert _error(of_right, left.T.detach(), weight) < 1


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.ones(120, 300, dtype=torch.float64), torch.ones(300, 400, dtype=torch.float64)),
        (torch.ones(120, 300, dtype=torch.bfloat16), torch.ones(300, 400, dtype=torch.bfloat16)),
        (torch.ones(3, 4), torch.ones(4, 5)),
        (torch.ones(0, 300), torch.ones(300, 400)),
    ],
    ids=["float64", "bfloat16", "small", "empty"],
)
def test_other_products_are_pytorchs(calls, left, right):
    with products.OneDNN():
        found = left @ right
    assert not calls
    assert torch.equal(found, left @ right)


@pytest.mark.parametrize(
    ("width", "dtype", "faster", "used"),
    [
        (512, torch.float32, True, True),
        (512, torch.float32, False, False),
        (512, torch.float64, True, False),
        (64, torch.float32, True, False),
    ],
)
def test_only_wide_float32_models_on_such_processors(calls, monkeypatch, width, dtype, faster, used):
    monkeypatch.setattr(products, "_is_faster", lambda: faster)
    model = torch.nn.Linear(width, 400, dtype=dtype)
    model.cfg = SimpleNamespace(d_model=width)
    with products.fast_products(model), torch.no_grad():
        model(torch.ones(90, width, dtype=dtype))
    assert bool(calls) == used
