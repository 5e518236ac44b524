"""A check, made once and quickly, whether the Hugging Face hub answers: offline work needs no minute of retries."""

from __future__ import annotations

import functools
import logging
import urllib.error
import urllib.request

logger = logging.getLogger(__name__)

OFFLINE_ADVICE = (
    "On a machine with access run `hf download NAME --local-dir DIR` (for gated repositories: accept the licence on "
    "the hub and `hf auth login` first), copy DIR here, and pass its path instead of the hub name."
)


@functools.cache
def hub_is_reachable() -> bool:
    """Return whether the hub answers a single request within seconds; False too if ``HF_HUB_OFFLINE`` is set.

    The hub's client retries each file for over 20 seconds before it gives up; callers pass
    ``local_files_only=not hub_is_reachable()`` so that an offline machine uses its cache at once or fails at once.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=10).close()
    except urllib.error.HTTPError:
        return True  # any answer means that it is reachable
    except OSError as error:
        logger.warning(
            "The hub %s cannot be reached (%s); only its local cache is used.", constants.ENDPOINT, error
        )
        return False
    return True
