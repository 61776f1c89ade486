"""explained: turns errors of huggingface_hub into sentences about one model that say what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from baton.errors import ModelError
from baton.hub_name import HubName

_LATER = "What was downloaded is kept; the next start continues the download"


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Raises ModelError instead of an error of the Hub, the network or the disk."""
    try:
        yield
    except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ModelError(_explanation(name, error)) from error


def _explanation(name: HubName, error: Exception) -> str:
    repo, hub, cache = name.repo, constants.ENDPOINT, constants.HF_HUB_CACHE
    match error:
        case GatedRepoError() if get_token() is None:
            return (
                f"{repo} is gated: accept its conditions at {hub}/{repo}, and set HF_TOKEN to a token of your account "
                f"({hub}/settings/tokens), or run `hf auth login`"
            )
        case GatedRepoError():
            return (
                f"{repo} is gated, and the account of HF_TOKEN has no access: accept its conditions at {hub}/{repo} "
                "with that account, or wait until its authors have agreed"
            )
        case RepositoryNotFoundError():
            return (
                f"model {str(name)!r} is not a folder or file here, and {hub} has no public model {repo}. Check the "
                "spelling; for a private model, set HF_TOKEN to a token that may read it"
            )
        case RevisionNotFoundError():
            return (
                f"{repo} has no revision {name.revision!r}: use a branch, a tag or a whole commit of "
                f"{hub}/{repo}/commits/main, or leave out @{name.revision}"
            )
        case HfHubHTTPError() if error.response.status_code == 401:
            return (
                f"{hub} refuses the token in HF_TOKEN, or of `hf auth login`, for {repo}; renew the token at "
                f"{hub}/settings/tokens"
            )
        case HfHubHTTPError():
            return f"{hub} answered {error.response.status_code} for {repo}: {first_line(error)}"
        case LocalEntryNotFoundError() | OfflineModeIsEnabled() if constants.HF_HUB_OFFLINE:
            return (
                f"model {str(name)!r} is not a folder or file here, the cache {cache} does not have the whole model, "
                "and HF_HUB_OFFLINE forbids downloads. Unset HF_HUB_OFFLINE, or copy the cache of a machine that has "
                "the model"
            )
        case LocalEntryNotFoundError() | httpx2.HTTPError():
            return (
                f"cannot reach {hub} ({first_line(error.__cause__ or error)}), and model {str(name)!r} is not a "
                f"folder here, and the cache {cache} does not have the whole model. Check network and proxy "
                f"(HTTPS_PROXY), or set HF_ENDPOINT to a mirror. {_LATER}"
            )
        case HFValidationError():
            return (
                f"model {str(name)!r} is not a folder or file here, and not a valid name of the Hub: "
                f"{first_line(error)}"
            )
        case ValueError() | KeyError() | TypeError() | AssertionError():
            return f"{hub} did not answer like a Hub ({first_line(error)}); check HF_ENDPOINT and the proxy"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return (
                f"the disk of {cache} became full during the download of {repo}; free some room, or set HF_HOME to a "
                f"folder on another disk. {_LATER}"
            )
        case OSError(errno=errno.EROFS) | PermissionError() if _is_below(error.filename, cache):
            return (
                f"the cache {cache} cannot be used for {name} ({error.strerror}: {error.filename}). Set HF_HOME to a "
                "folder that may be read and written or, if the cache has an earlier commit, HF_HUB_OFFLINE=1 to "
                "serve it"
            )
    return f"cannot prepare {name} in {cache}: {error}"


def _is_below(path: object, folder: str | Path) -> bool:
    return isinstance(path, str) and Path(path).is_relative_to(folder)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
