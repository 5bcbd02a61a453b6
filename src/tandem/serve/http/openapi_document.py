"""Make a service's OpenAPI document from its routes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, get_args

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from tandem.serve.http.refusals import CODES, speaks_openai
from tandem.serve.http.request_bounds import KEY_PATTERN

JSON, EVENTS, LINES, PAGE = "application/json", "text/event-stream", "application/x-ndjson", "text/html"
_VERSION = "1"  # of the routes
_REF = "#/components/schemas/"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class _Spoken:
    body: Any = None
    optional: bool = False
    types: Sequence[str] = (JSON,)
    answers: Sequence[str] = (JSON,)
    status: int = 200
    query: Sequence[str] = ()
    key: Literal["", "required", "optional"] = ""
    answer: Any = None
    several: bool = False
    refuses: Sequence[int] = ()
    scope: str = ""


def speaks(body: Any = None, **more: Any) -> Callable[[F], F]:
    """Describe an endpoint's requests and responses. `body`: a pydantic model, a msgspec struct or a union; `optional`:
    the body may be left out; `types`, `answers`: media types; `status`: of success; `query`: parameters; `key`: whether
    an Idempotency-Key is required or optional; `answer`: the pydantic model of a JSON answer; `several`: it may be
    a list of such answers; `refuses`: statuses beside those of every such route; `scope`: what a key must have."""

    def mark(endpoint: F) -> F:
        endpoint.__dict__["spoken"] = _Spoken(body, **more)
        return endpoint

    return mark


class Endpoints:
    """Maps operation ids to functions. FastAPI calls `name` for each route, and its document has only the name."""

    def __init__(self) -> None:
        self.by_id: dict[str, Callable[..., Any]] = {}

    def name(self, route: Any) -> str:
        method = min(route.methods)
        name = f"{method} {route.path_format}"
        self.by_id[name] = route.endpoint
        return name


def document(
    app: FastAPI,
    endpoints: Endpoints,
    hot: Sequence[Route],
    open_paths: frozenset[str],
    of_all: frozenset[int] = frozenset(),
) -> dict[str, Any]:
    """`of_all`: statuses that each route may answer with, but for those that are open."""
    paths: dict[str, dict[str, dict[str, Any]]] = deepcopy(app.openapi()["paths"])
    spoken = {name: getattr(endpoint, "spoken", _Spoken()) for name, endpoint in endpoints.by_id.items()}
    for route in hot:
        name = endpoints.name(route)
        spoken[name] = getattr(route.endpoint, "spoken", _Spoken())
        text = (route.endpoint.__doc__ or "").strip()
        operation = {"operationId": name, "summary": route.name.replace("_", " ").capitalize()}
        paths.setdefault(route.path_format, {})[name.partition(" ")[0].lower()] = operation | (
            {"description": text} if text else {}
        )
    refs, schemas = _schemas(list(_kinds(spoken.values())))
    for path, operations in paths.items():
        for operation in operations.values():
            said = spoken[operation["operationId"]]
            if path in open_paths:
                operation["security"] = []
            elif said.scope and of_all:
                operation["security"] = [{"token": [said.scope]}]
            if parameters := [*_parameters(operation.get("parameters", []), said, path)]:
                operation["parameters"] = parameters
            operation["responses"] = _responses(operation, said, path, refs, of_all, is_open=path in open_paths)
            if said.body is not None:
                options = [refs[kind] for kind in _members(said.body)]
                schema = options[0] if len(options) == 1 else {"anyOf": options}
                content = {kind: {"schema": schema if kind == JSON else {}} for kind in said.types}
                operation["requestBody"] = {"required": not said.optional, "content": content}
    return {
        "openapi": "3.1.0",
        "info": {"title": app.title, "version": _VERSION},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": _ERRORS | schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _parameters(known: Sequence[Mapping[str, Any]], said: _Spoken, path: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters that FastAPI knows, and those that an endpoint reads from its request."""
    yield from known
    known_names = {each["name"] for each in known}
    for name in re.findall(r"{(\w+)}", path):
        if name not in known_names:
            yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name in said.query:
        yield {"name": name, "in": "query", "schema": {"type": "string"}}
    if said.key:
        required = said.key == "required"
        schema = {"type": "string", "pattern": f"^{KEY_PATTERN}$"}
        yield {"name": "Idempotency-Key", "in": "header", "required": required, "schema": schema}


# --- responses


def _responses(
    operation: Mapping[str, Any],
    said: _Spoken,
    path: str,
    refs: Mapping[Any, Any],
    of_all: frozenset[int],
    *,
    is_open: bool,
) -> dict[str, Any]:
    json_schema = {"type": "object"} if said.answer is None else refs[said.answer]
    if said.several:
        json_schema = {"anyOf": [json_schema, {"type": "array", "items": json_schema}]}
    schemas = {JSON: {"schema": json_schema}, EVENTS: {}}  # tools hold a schema of events against each of them
    content = {kind: schemas.get(kind, {"schema": {"type": "string"}}) for kind in said.answers}
    found: dict[str, Any] = {str(said.status): {"description": "Success.", "content": content}}
    statuses = {403, 421, 500, 503, *said.refuses} | (set() if is_open else {401, *of_all})
    if operation.get("parameters"):
        statuses |= {404, 422}
    if said.body is not None:
        statuses |= {404, 408, 409, 413, 415, 422, 429, 507}
    if not operation["operationId"].startswith("GET "):
        statuses |= {404, 409, 422}
    error = "OpenAiError" if speaks_openai(path) else "Error"
    for status in sorted(statuses, key=lambda status: 400 if status == 422 else status):
        told = 400 if speaks_openai(path) and status == 422 else status
        found[str(told)] = {
            "description": CODES[status].replace("_", " "),
            "content": {JSON: {"schema": {"$ref": f"{_REF}{error}"}}},
        }
    return found


def _error(**more: Any) -> dict[str, Any]:
    named = {"code": {"type": "string"}, "message": {"type": "string"}, "field": {"type": "string"}}
    error = {"type": "object", "required": ["code", "message", *more], "properties": named | more}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


_ERRORS = {
    "Error": _error(),
    "OpenAiError": _error(type={"type": "string"}, param={"type": ["string", "null"]}),
}


# --- bodies


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _kinds(spoken: Any) -> Iterator[Any]:
    for each in spoken:
        if each.body is not None:
            yield from _members(each.body)
        if each.answer is not None:
            yield each.answer


def _schemas(kinds: Sequence[Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the reference to each model, and the schemas that are referred to."""
    models = list(dict.fromkeys(kind for kind in kinds if _is_model(kind)))
    structs = list(dict.fromkeys(kind for kind in kinds if not _is_model(kind)))
    refs, schemas = dict[Any, Any](), dict[str, Any]()
    if models:
        found, whole = models_json_schema([(model, "validation") for model in models], ref_template=f"{_REF}{{model}}")
        refs |= {model: schema for (model, _), schema in found.items()}
        schemas |= whole.get("$defs", {})
    if structs:
        outer, inner = msgspec.json.schema_components(structs, ref_template=f"{_REF}{{name}}")
        refs |= dict(zip(structs, outer, strict=True))
        assert not schemas.keys() & inner.keys(), "two bodies have the same name"
        schemas |= inner
    return refs, schemas


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
