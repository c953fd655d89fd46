"""The suite checks calls of functions whose annotations have shapes; errors that are tested are the functions' own."""

from __future__ import annotations

from collections.abc import Callable

import jaxtyping
import pytest
import torch
from small_models import lab

from ln_probe.analyses.geometry.keys import centre
from ln_probe.analyses.probes.uniformity import scores
from ln_probe.hooks.sites import find_sites
from ln_probe.hooks.variants import changed_output


def refused(call: Callable[[], object]) -> str:
    """What the check says to a call; `pytest.raises` would switch it off."""
    try:
        call()
    except jaxtyping.TypeCheckError as error:
        return str(error)
    return ""


def test_wrong_shapes_are_refused() -> None:
    site = find_sites(lab())[0]
    x, y = torch.zeros(3, 32), torch.zeros(3, 31)
    assert "parameter 'y'" in refused(lambda: changed_output(site, "no_scaling", x, y, 1.0))
    assert "parameter 'x'" in refused(lambda: site.sigma(torch.zeros(3, 32, dtype=torch.long)))
    q, k = torch.zeros(4, 2, 8), torch.zeros(5, 3, 8)
    assert "parameter 'k'" in refused(lambda: scores(q, k, 1.0))
    assert refused(lambda: changed_output(site, "no_scaling", x, x, 1.0)) == ""


def test_a_tested_error_is_the_functions_own() -> None:
    site = find_sites(lab())[0]
    with pytest.raises(TypeError, match="vectors of real numbers"):
        site.decompose(torch.zeros(3, 32, dtype=torch.long))
    assert "parameter 'x'" in refused(lambda: site.decompose(torch.zeros(3, 32, dtype=torch.long)))


def test_compiled_kernels_are_not_wrapped() -> None:
    assert type(centre).__module__.startswith("numba")
