"""The suite checks calls of functions whose annotations have shapes; errors that are tested are the functions' own."""

from __future__ import annotations

from collections.abc import Callable

import jaxtyping
import pytest
import torch
from small_models import lab

from ln_probe.analyses.geometry.keys import centre
from ln_probe.analyses.probes.uniformity import scores
from ln_probe.hooks import find_norms


def refused(call: Callable[[], object]) -> str:
    """What the check says to a call; `pytest.raises` would switch it off."""
    try:
        call()
    except jaxtyping.TypeCheckError as error:
        return str(error)
    return ""


def test_wrong_shapes_are_refused() -> None:
    site = find_norms(lab())[0]
    x = torch.zeros(3, 32)
    assert "parameter 'constant'" in refused(lambda: site.without("no_scaling", x, torch.ones(2, 1)))
    assert "parameter 'x'" in refused(lambda: site.sigma(torch.zeros(3, 32, dtype=torch.long)))
    q, k = torch.zeros(4, 2, 8), torch.zeros(5, 3, 8)
    assert "parameter 'k'" in refused(lambda: scores(q, k, 1.0))
    assert refused(lambda: site.without("no_scaling", x, torch.ones(3, 1))) == ""


def test_a_tested_error_is_the_functions_own() -> None:
    site = find_norms(lab())[0]
    with pytest.raises(TypeError, match="vectors of real numbers"):
        site.decompose(torch.zeros(3, 32, dtype=torch.long))
    assert "parameter 'x'" in refused(lambda: site.decompose(torch.zeros(3, 32, dtype=torch.long)))


def test_compiled_kernels_are_not_wrapped() -> None:
    assert type(centre).__module__.startswith("numba")
