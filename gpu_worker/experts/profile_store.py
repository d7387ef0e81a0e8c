"""The file that keeps how often a model's experts are used from one run to the next."""

import logging
import os
from pathlib import Path

from shared.cache_directory import cache_directory
from shared.errors import ConfigError
from shared.gguf.model import GGUFModel
from shared.model_config import Qwen4ExpConfig
from shared.placement import profile
from shared.placement.hotness import Counts

_log = logging.getLogger(__name__)


class ProfileStore:
    """Where the profile of one model is."""

    def __init__(self, asked: Path | None, model: GGUFModel, config: Qwen4ExpConfig) -> None:
        """`asked` is the file of `--expert-profile`, in a folder that is there; without it, the model has one
        in the cache directory, which is made."""
        self._identity = profile.model_identity(model, config)
        self._is_asked = asked is not None
        self.path = asked or cache_directory() / "profiles" / f"{self._identity.fingerprint}.profile"

    def load(self) -> Counts | None:
        """What was learned; None where there is nothing yet. Raises ConfigError for a file that was asked for
        and is no profile of this model, or cannot be written for want of its folder."""
        remedy = "delete it"
        if self._is_asked:
            remedy = "name another file (--expert-profile; one that does not exist is created)"
        try:
            if self._is_there():
                return profile.load(self.path, self._identity, remedy)
        except ConfigError as error:
            if self._is_asked:
                raise
            _log.warning("the profile is begun anew: %s", error)
            return None
        if self._is_asked and not self.path.parent.is_dir():
            raise ConfigError(
                f"--expert-profile is {self.path}, but there is no folder {self.path.parent}; make it, or "
                "name another file"
            )
        return None

    def _is_there(self) -> bool:
        try:
            return self.path.exists()
        except OSError:
            # A name that cannot be one: whoever reads it says why.
            return True

    def save(self, counts: Counts) -> None:
        """Writes what was learned, unless that is nothing. What cannot be written is logged: nothing depends
        on it."""
        if not counts.any():
            return
        try:
            if not self._is_asked:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            profile.save(self.path, counts, self._identity)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            _log.warning("the expert profile cannot be written to %s: %s", self.path, reason)
