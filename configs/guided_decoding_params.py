"""`GuidedDecodingParams`: what a request's text must match."""

from dataclasses import dataclass
from typing import Any


@dataclass
class GuidedDecodingParams:
    """One constraint on the generated text, and how it is enforced.

    At most one of `json`, `regex`, `choice`, `grammar` and `json_object` is given; more raise
    ValueError.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema, as text or as a dict
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # EBNF or Lark
    json_object: bool | None = None  # any JSON object
    backend: str | None = None  # None: the engine's default
    backend_was_auto: bool = False
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        names = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"guided decoding takes one constraint, got {', '.join(given)}")

    @classmethod
    def from_optional(
        cls,
        json: Any = None,
        regex: str | None = None,
        choice: list[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        backend: str | None = None,
        whitespace_pattern: str | None = None,
        structural_tag: str | None = None,
    ) -> "GuidedDecodingParams | None":
        """None if no constraint is given. `json` may also be a pydantic model or its class."""
        constraints = (json, regex, choice, grammar, json_object, structural_tag)
        if all(constraint is None for constraint in constraints):
            return None
        to_schema = getattr(json, "model_json_schema", None)
        return cls(
            json=to_schema() if to_schema is not None else json,
            regex=regex,
            choice=choice,
            grammar=grammar,
            json_object=json_object,
            backend=backend,
            whitespace_pattern=whitespace_pattern,
            structural_tag=structural_tag,
        )
