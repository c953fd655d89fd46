"""Local silence: no network and no chatter while a model is loaded, and everything as it was afterwards."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

_LOG = logging.getLogger("ln_probe.loading")


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Make every request to a model hub fail at once, for as long as the block lasts.

    Both transformers and huggingface_hub ask this one constant at each request. The environment variable
    of the same meaning is read only once, at import, so setting it here would come too late and would stay
    behind in the caller's process.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


class _LibraryChatter(logging.Filter):
    """Drops what TransformerLens logs on the root logger, and keeps it at debug level under our own name."""

    def filter(self, record: logging.LogRecord) -> bool:
        if "transformer_lens" not in record.pathname:
            return True
        _LOG.debug("transformer_lens: %s", record.getMessage())
        return False


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """Draw from a seed of our own, and leave the caller's random numbers where they were.

    Weights that a folder lacks (a headless model's head) are drawn at random, and building a model draws too.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


@contextlib.contextmanager
def quiet(*, progress: bool = False) -> Iterator[None]:
    """Keep the libraries' prints, warnings, log lines and progress bars away from the console.

    Args:
        progress: leave progress bars on (a download can take minutes).

    TransformerLens prints on loading, logs on the root logger (which may install a handler there), and both
    libraries set log levels when imported. All of it is undone on the way out.
    """
    from transformers.utils import logging as transformers_logging

    root, library = logging.getLogger(), logging.getLogger("transformers")
    handlers, level = list(root.handlers), library.level
    had_bar = transformers_logging.is_progress_bar_enabled()
    chatter = _LibraryChatter()
    root.addFilter(chatter)
    library.setLevel(logging.ERROR)
    if not progress:
        transformers_logging.disable_progress_bar()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            if not progress:  # some bars are drawn by tqdm itself, past transformers' own switch
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        root.removeFilter(chatter)
        root.handlers[:] = handlers
        library.setLevel(level)
        if had_bar and not progress:
            transformers_logging.enable_progress_bar()
