"""Where a user's Strata keeps between starts what it can make anew.

::

    $STRATA_CACHE_DIR, else $XDG_CACHE_HOME/strata, else ~/.cache/strata
        kernels/     compiled kernels (`shared.quants.compile_cache`)
        profiles/    how often experts of a model are used (`shared.placement.profile`)
"""

import os
from pathlib import Path


def cache_directory() -> Path:
    """The directory; it need not exist."""
    if chosen := os.environ.get("STRATA_CACHE_DIR"):
        return Path(chosen)
    if user_caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(user_caches) / "strata"
    return Path.home() / ".cache" / "strata"
