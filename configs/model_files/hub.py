"""Fetch a model from a Hugging Face hub into the hub's own cache.

huggingface_hub does the transfer (HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and resuming are
its own); here are the choice of files and one clear error for each way it can fail. It is imported
only when a hub id is used.
"""

import errno
import glob
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.progress import Progress

# What headrace reads of a repository; only its top level counts.
_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
)
_NOT_READ = ("*/*", "consolidated*")  # sub-folders, and the same weights in another layout
_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?::(?P<file>[^:]+\.gguf))?", re.ASCII)
_MAX_REPO_CHARS = 96  # the hub's own limit


@dataclass(frozen=True)
class HubName:
    """`org/name`, or `org/name:FILE.gguf` for one file of the repository."""

    repo: str
    file: str | None = None

    @classmethod
    def parse(cls, name: str) -> "HubName | None":
        """None when `name` does not have the form of a hub id."""
        match = _NAME.fullmatch(name)
        if not match or len(match["repo"]) > _MAX_REPO_CHARS:
            return None
        if any(part in ("", ".", "..") for part in (match["file"] or "x").split("/")):
            return None
        return cls(match["repo"], match["file"])

    def __str__(self) -> str:
        return f"{self.repo}:{self.file}" if self.file else self.repo


def download(
    name: HubName,
    *,
    revision: str | None = None,
    token: bool | str | None = None,
    download_dir: Path | None = None,
    progress: bool = True,
) -> Path:
    """Fetch `name`; returns its snapshot directory, or the .gguf file in it.

    `revision`: a branch, tag or commit; None: main.

    `token` None: the one of HF_TOKEN or the login, if there is one; True: that one is required;
    False: none. `download_dir` replaces the hub's cache directory. Files that are there already are
    not fetched again, and a transfer that broke off goes on where it stopped. Raises
    ModelFileError, which never shows the token.
    """
    import huggingface_hub

    report = Progress(progress)
    report.say(f"{name}: looking for it on the hub{f' at revision {revision}' if revision else ''}")
    allow = [glob.escape(name.file)] if name.file else list(_PATTERNS)
    try:
        snapshot = huggingface_hub.snapshot_download(
            name.repo,
            revision=revision,
            token=token,
            cache_dir=download_dir,
            allow_patterns=allow,
            ignore_patterns=None if name.file else list(_NOT_READ),
            tqdm_class=None if progress and sys.stderr.isatty() else _hidden_bar(),
            library_name="headrace",
        )
    except Exception as error:  # the HTTP library's own classes differ between versions
        message = _explain(name, revision, error)
        if isinstance(token, str) and token:
            message = message.replace(token, "***")
        raise ModelFileError(message) from None  # the cause may show request headers
    return _checked(name, Path(snapshot))


def _checked(name: HubName, snapshot: Path) -> Path:
    if name.file:
        file = snapshot / name.file
        if file.is_file():
            return file
        raise ModelFileError(
            f"the repository {name.repo} has no file {name.file}; look at its list of files"
        )
    if (snapshot / "config.json").is_file():
        return snapshot
    raise ModelFileError(
        f"the repository {name.repo} has no config.json, so it is not a model in transformers' "
        f"layout; if it holds GGUF files, name one of them: {name.repo}:FILE.gguf"
    )


def _hidden_bar() -> type:
    """A bar class for huggingface_hub that shows nothing, whatever its version passes to a bar."""
    from tqdm.auto import tqdm

    class HiddenBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # huggingface_hub's own name for a group of bars
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)

    return HiddenBar


def _explain(name: HubName, revision: str | None, error: Exception) -> str:
    """One sentence for whatever went wrong, with what to do."""
    from huggingface_hub import constants

    chain = list(_chain(error))
    by_cause = next((text for cause in chain if (text := _by_cause(name, revision, cause))), None)
    if by_cause is not None:
        return by_cause
    response = next((r for c in chain if (r := getattr(c, "response", None)) is not None), None)
    if response is not None:
        return _by_status(name, constants.ENDPOINT, int(response.status_code), chain)
    first_line = (str(error).splitlines() or [""])[0]
    return (
        f"{name} could not be fetched from {constants.ENDPOINT}: {type(chain[-1]).__name__}: "
        f"{first_line}; check the network, or set HF_ENDPOINT to a mirror"
    )


def _by_cause(name: HubName, revision: str | None, cause: BaseException) -> str | None:
    """What to say when one error of the chain tells all, else None."""
    from huggingface_hub import errors

    if isinstance(cause, errors.OfflineModeIsEnabled):
        return (
            f"{name} is not in the hub's cache, and offline mode is on (HF_HUB_OFFLINE); unset it, "
            "or fetch the model on a machine with access and copy the cache"
        )
    if isinstance(cause, errors.LocalTokenNotFoundError):
        return (
            f"a token is required for {name}, but none is stored; set HF_TOKEN or run `hf auth "
            "login`"
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return (
            f"the repository {name.repo} has no revision {revision or 'main'!r}; give a branch, a "
            "tag or a commit that exists"
        )
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"not enough disk space for {name}: {cause}; free some space, or set HF_HOME (or "
            "--download-dir) to a directory on a larger disk"
        )
    return None


def _by_status(name: HubName, endpoint: str, status: int, chain: list[BaseException]) -> str:
    """What to say for an HTTP status; 401 is also the answer for what strangers may not see."""
    from huggingface_hub import errors

    if status == 403 or any(isinstance(cause, errors.GatedRepoError) for cause in chain):
        return (
            f"{name.repo} is gated (HTTP {status}): accept its licence at {endpoint}/{name.repo} "
            "with your account, then set HF_TOKEN to a token of it"
        )
    if status == 401 and any(isinstance(c, errors.RepositoryNotFoundError) for c in chain):
        return (
            f"the hub shows no repository {name.repo} to you (HTTP 401): check the spelling; for a "
            "private one set HF_TOKEN to a token that may read it"
        )
    if status == 401:
        return (
            f"the hub refused the token for {name.repo} (HTTP 401): set HF_TOKEN to a valid one, "
            "or unset it"
        )
    if status == 404:
        return f"the hub at {endpoint} has no repository {name.repo} (HTTP 404): check the spelling"
    return f"the hub at {endpoint} answered HTTP {status} for {name}; try again later"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and what caused it, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
