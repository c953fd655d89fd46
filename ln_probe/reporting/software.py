"""Which software made a report."""

from __future__ import annotations

__version__ = "0.1.0"

_LIBRARIES = ("torch", "transformer-lens", "transformers", "numpy", "scipy", "pandas")


def versions() -> dict[str, str]:
    """Of Python and of the libraries that numbers depend on."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # pragma: no cover - a vendored install
            found[name] = "unknown"
    return found
