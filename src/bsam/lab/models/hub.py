"""The Hugging Face hub, from which timm downloads weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

TIMEOUT = 5.0  # seconds


def connection_error() -> str | None:
    """Return why the hub cannot be reached; None if it answers. Proxies and settings are those of huggingface_hub."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # not marked as public

    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # the classes depend on the version; offline mode raises, too
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


@contextlib.contextmanager
def only_cached() -> Iterator[None]:
    """Let huggingface_hub use the files in its cache, without a connection.

    Without a connection it would ask for each file six times, which takes half a minute.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
