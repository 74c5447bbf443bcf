"""Options of `headrace serve` about its HTTP front end, and the `ServerOptions` they make."""

# ruff: noqa: RUF009 (every default here is made by option(), a dataclass field)

import argparse
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any, cast

from headrace.configs.environment import LOG_LEVELS
from headrace.configs.errors import ConfigurationError, InvalidRequestError
from headrace.configs.options import check_options, option, parse_size
from headrace.frontend.http.limits import RequestLimits
from headrace.frontend.http.listener import CrossOrigin, ServerOptions, Tls
from headrace.frontend.render_params import ContentFormat

_LIMITS = RequestLimits()
_option = partial(option, group="frontend")


def parse_names(text: str) -> list[str]:
    """A JSON list of strings, or one word."""
    if not text.lstrip().startswith("["):
        return [text]
    try:
        names = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not JSON: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise argparse.ArgumentTypeError(f'{text[:60]!r} is not a list like ["a", "b"]')
    return names


@dataclasses.dataclass
class FrontendOptions:
    """Every front-end option by name, default and help."""

    host: str | None = _option(
        None, "address to listen on (default: 127.0.0.1; with an API key, all addresses)"
    )
    port: int = _option(8000, "port to listen on; 0 finds a free one")
    uds: str | None = _option(None, "path of a Unix socket to listen on, instead of host and port")
    root_path: str = _option("", "path prefix that a proxy in front strips")
    api_key: list[str] | None = _option(
        None, "keys that clients must send, any of them (default: the variable HEADRACE_API_KEY)",
        secret=True,
    )  # fmt: skip
    admin_api_key: list[str] | None = _option(
        None, "keys for routes that change the engine: pause, sleep, weight updates, "
        "collective_rpc; without one there are no such routes", secret=True,
    )  # fmt: skip
    allowed_origins: list[str] | None = _option(
        None, "JSON list of origins whose pages may call the server (default: none)",
        parse=parse_names,
    )  # fmt: skip
    allowed_methods: list[str] | None = _option(
        None, "JSON list of methods for them (default: all)", parse=parse_names
    )
    allowed_headers: list[str] | None = _option(
        None, "JSON list of headers for them (default: all)", parse=parse_names
    )
    allow_credentials: bool = _option(False, "let them send cookies")
    ssl_keyfile: str | None = _option(None, "private key of the HTTPS certificate")
    ssl_certfile: str | None = _option(None, "HTTPS certificate")
    ssl_ca_certs: str | None = _option(None, "certificates that clients' ones are checked against")
    ssl_cert_reqs: int = _option(
        0, "whether clients need certificates: 0 no, 1 if they send one, 2 yes", minimum=0
    )
    chat_template: str | None = _option(
        None, "file with a chat template, or the template (default: the model's)"
    )
    chat_template_content_format: str = _option(
        "auto", "how the template wants message content", choices=["auto", "string", "openai"]
    )
    default_chat_template_kwargs: dict[str, Any] | None = _option(
        None, "JSON object of template variables; those of a request win"
    )
    response_role: str = _option("assistant", "role of the answers to chats")
    trust_request_chat_template: bool = _option(
        False, "let clients send chat templates of their own"
    )
    enable_prompt_tokens_details: bool = _option(
        False, "report cached prompt tokens in the usage of responses"
    )
    enable_force_include_usage: bool = _option(
        False, "report usage in every stream, asked for or not"
    )
    return_tokens_as_token_ids: bool = _option(False, "write tokens in logprobs as token_id:ID")
    sse_keep_alive_interval: float = _option(
        0.0, "seconds after which an idle stream gets a comment; 0: never", minimum=0
    )
    enable_server_load_tracking: bool = _option(False, "count running requests for GET /load")
    max_log_len: int | None = _option(
        None, "most characters or ids of a prompt in the log (default: all)", minimum=0
    )
    h11_max_header_count: int = _option(
        _LIMITS.max_header_count, "most headers of a request", minimum=1
    )
    h11_max_incomplete_event_size: int = _option(
        _LIMITS.max_header_bytes, "most bytes of a request's headers", minimum=1, parse=parse_size
    )
    shutdown_timeout: float = _option(
        ServerOptions.shutdown_timeout,
        "seconds that running requests may take to finish after SIGTERM or SIGINT; 0: none",
        minimum=0, flags=["--drain-timeout"],
    )  # fmt: skip
    api_server_count: int = _option(
        1, "processes that answer HTTP, on one port; each has its own metrics", minimum=1
    )
    strict: bool = _option(
        False, "refuse unknown request fields, and listening to others without an API key"
    )
    access_log: bool = _option(False, "log a line for every HTTP request")
    disable_uvicorn_access_log: bool = _option(
        False, "another spelling of --no-access-log", switch=True
    )
    uvicorn_log_level: str = _option(
        "warning", "least level of the HTTP server's own log", choices=LOG_LEVELS
    )
    log_level: str | None = _option(
        None, "least level of the log (default: the variable HEADRACE_LOGGING_LEVEL, or info)",
        choices=LOG_LEVELS,
    )  # fmt: skip

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "FrontendOptions":
        """Read every field from the namespace."""
        return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})

    def server_options(self, environment_key: str, *, logs_requests: bool) -> ServerOptions:
        """The frozen options, with files read. Raises ConfigurationError.

        `environment_key` is used when no key is given; "" is none.
        """
        check_options(self)
        if self.access_log and self.disable_uvicorn_access_log:
            raise ConfigurationError(
                "--access-log and --disable-uvicorn-access-log contradict each other; give one"
            )
        keys = self.api_key or ([environment_key] if environment_key else [])
        return ServerOptions(
            host=self.host,
            port=self.port,
            api_keys=tuple(keys),
            admin_api_keys=tuple(self.admin_api_key or ()),
            uds=self.uds,
            root_path=self._root_path(),
            tls=self._tls(),
            cross_origin=self._cross_origin(),
            limits=RequestLimits(
                max_header_count=self.h11_max_header_count,
                max_header_bytes=self.h11_max_incomplete_event_size,
            ),
            strict=self.strict,
            response_role=self.response_role,
            chat_template=read_chat_template(self.chat_template),
            chat_template_content_format=cast(ContentFormat, self.chat_template_content_format),
            default_chat_template_kwargs=self.default_chat_template_kwargs or {},
            trust_request_chat_template=self.trust_request_chat_template,
            enable_prompt_tokens_details=self.enable_prompt_tokens_details,
            enable_force_include_usage=self.enable_force_include_usage,
            return_tokens_as_token_ids=self.return_tokens_as_token_ids,
            sse_keep_alive_interval=self.sse_keep_alive_interval,
            enable_log_requests=logs_requests,
            max_log_len=self.max_log_len,
            enable_server_load_tracking=self.enable_server_load_tracking,
            access_log=self.access_log,
            shutdown_timeout=self.shutdown_timeout,
        )

    def _root_path(self) -> str:
        path = self.root_path.rstrip("/")
        if path and not (path.startswith("/") and path.isascii()):
            raise ConfigurationError(f"--root-path must be a path like /llm, got {path!r}")
        return path

    def _tls(self) -> Tls | None:
        if self.ssl_certfile is None and self.ssl_keyfile is None:
            if self.ssl_ca_certs is not None or self.ssl_cert_reqs:
                raise ConfigurationError(
                    "--ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile and --ssl-keyfile"
                )
            return None
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            raise ConfigurationError("HTTPS needs both --ssl-certfile and --ssl-keyfile")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigurationError(f"--ssl-cert-reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        return Tls(self.ssl_keyfile, self.ssl_certfile, self.ssl_ca_certs, self.ssl_cert_reqs)

    def _cross_origin(self) -> CrossOrigin:
        origins = _joined(self.allowed_origins)
        if self.allow_credentials and "*" in origins:
            raise ConfigurationError(
                "--allow-credentials with every origin would let any page act for its visitor; "
                "name the origins in --allowed-origins"
            )
        return CrossOrigin(
            origins,
            _joined(self.allowed_methods) or ("*",),
            _joined(self.allowed_headers) or ("*",),
            self.allow_credentials,
        )


def _joined(words: Any) -> tuple[str, ...]:
    """All names of all words; each word of the command line became a list."""
    return tuple(
        name for word in words or () for name in (word if isinstance(word, list) else [word])
    )


def read_chat_template(given: str | None) -> str | None:
    """The text of a template that is given as a file or as itself, and compiles.

    Raises ConfigurationError.
    """
    source = None if given is None else _chat_template_text(given)
    if source is not None:
        from headrace.frontend.template_sandbox import compile_template  # jinja2: not for --help

        try:
            compile_template(source)
        except InvalidRequestError as error:
            raise ConfigurationError(f"--chat-template: {error}") from error
    return source


def _chat_template_text(given: str) -> str:
    try:
        if Path(given).is_file():
            return Path(given).read_text()
    except (OSError, ValueError) as error:  # a name too long or with NUL is no file
        if "{" not in given:
            raise ConfigurationError(f"--chat-template cannot be read: {error}") from error
    if "{" not in given:
        raise ConfigurationError(
            f"--chat-template {given[:200]!r} is neither a file nor a template (which has {{{{ or "
            "{% somewhere)"
        )
    return given
