"""`/v1/models`: one card for every served name."""

import time
import uuid

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException

from headrace.configs.config import ModelConfig
from headrace.frontend.http.errors import RequestRefused, error_response, show_value
from headrace.frontend.http.health import json_response
from headrace.frontend.http.server_state import ServerState


class Permission(msgspec.Struct, frozen=True):
    """Part of a model card that clients expect; it says nothing about this server."""

    id: str
    created: int
    object: str = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, frozen=True):
    """A served model; `root` is where it was loaded from, as the operator named it."""

    id: str
    created: int
    root: str
    max_model_len: int
    permission: list[Permission]
    object: str = "model"
    owned_by: str = "headrace"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    """Answer of `GET /v1/models`."""

    data: list[ModelCard]
    object: str = "list"


class ModelRoutes:
    """`GET /v1/models` and `GET /v1/models/{id}`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._created = int(time.time())

    async def list_models(self, request: Request) -> Response:
        config = self._state.engine.model_config
        return json_response(ModelList([self._card(config, name) for name in _names(config)]))

    async def get_model(self, request: Request) -> Response:
        config = self._state.engine.model_config
        given = request.path_params["model"]
        if not given:
            raise HTTPException(404)  # "/v1/models/": redirected to the list
        try:
            name = check_model_name(config, given)
        except RequestRefused as error:
            return error_response(error)
        return json_response(self._card(config, name))

    def _card(self, config: ModelConfig, name: str) -> ModelCard:
        permission = Permission(f"modelperm-{uuid.uuid4().hex}", self._created)
        return ModelCard(name, self._created, config.model, config.max_model_len, [permission])


def check_model_name(config: ModelConfig, name: str | None) -> str:
    """`name` if it is served, the first served name if it is empty; else a 404."""
    if not name:
        return config.served_model_name
    if name in config.served_model_names:
        return name
    raise RequestRefused(
        404,
        "NotFoundError",
        f"The model {show_value(name)} does not exist; this server has "
        f"{', '.join(_names(config))}.",
        "model",
    )


def _names(config: ModelConfig) -> list[str]:
    return list(dict.fromkeys(config.served_model_names))
