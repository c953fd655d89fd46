"""Which software made a report."""

from __future__ import annotations

__version__ = "0.2.0"

_OPTIONAL = ("numba", "circuitsvis", "gguf", "gmpy2", "python-flint", "ray")
_LIBRARIES = ("torch", "transformer-lens", "transformers", "numpy", "scipy", "pandas")


def environment() -> dict[str, str]:
    """What a report of a fault should say: versions, the worlds that can be had, device, threads, places of caches.

    Imports torch and TransformerLens.
    """
    import os
    import platform

    import torch

    from ln_probe.loading.convert import has_hooked_transformer

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    optional = {name: _version(name) for name in _OPTIONAL}
    return (
        {"ln_probe": __version__}
        | versions()
        | {name: found for name, found in optional.items() if found != "unknown"}
        | {
            "worlds": "HookedTransformer, TransformerBridge" if has_hooked_transformer() else "TransformerBridge",
            "devices": ", ".join(devices),
            "threads": f"{torch.get_num_threads()} of {os.cpu_count()}",
            "system": platform.platform(),
        }
    )


def versions() -> dict[str, str]:
    """Of Python and of the libraries that numbers depend on."""
    import platform

    return {"python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES}


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:  # not installed, or vendored
        return "unknown"
