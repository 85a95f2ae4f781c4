"""The OpenAPI description, and a page that shows it without asking anyone else for scripts or styles."""

import html
import json
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

REFUSALS = {
    "400": "The request is wrong: a field, a value, a text that does not fit the model, or a limit.",
    "401": "An API key is wanted.",
    "408": "Not done in time.",
    "413": "The body is too large.",
    "429": "The queue is full; Retry-After says when to come back.",
    "503": "The model is being loaded, or the server is stopping.",
}
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 0.9em ui-monospace, monospace }
h2 { border-top: 1px solid #8886; padding-top: 1.5rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid #8883 }
"""


def describe(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with the refusals that this server gives instead of FastAPI's own."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path, methods in document["paths"].items():
            for operation in methods.values():
                if "requestBody" not in operation:
                    continue
                if path != "/v1/fim/completions":  # Mistral's clients know 422
                    operation["responses"].pop("422", None)
                for status, description in REFUSALS.items():
                    operation["responses"].setdefault(status, {"description": description})
        app.openapi_schema = document
    return app.openapi_schema


def page(document: dict[str, Any]) -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{html.escape(document['info']['title'])} API</title><style>{STYLE}</style>",
        f"<h1>{html.escape(document['info']['title'])} API</h1><p>{html.escape(document['info'].get('description', ''))}",
        "<p>The same for programs: <a href='openapi.json'>openapi.json</a>.",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{html.escape(operation.get('summary', ''))}")
            if body := operation.get("requestBody"):
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(_fields(document["components"]["schemas"][name]))
            answers = (f"<li><code>{status}</code> {html.escape(told['description'])}" for status, told in operation["responses"].items())
            parts.append(f"<ul>{''.join(answers)}</ul>")
    return "\n".join(parts)


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = []
    for name, field in schema["properties"].items():
        default = "required" if name in required else json.dumps(field["default"]) if "default" in field else ""
        cells = (f"<code>{html.escape(name)}</code>", html.escape(_kind(field)), f"<code>{html.escape(default)}</code>")
        rows.append("<tr>" + "".join(f"<td>{cell}" for cell in cells) + f"<td>{html.escape(field.get('description', ''))}")
    return "<table><tr><th>field<th>kind<th>default<th>" + "".join(rows) + "</table>"


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(_kind, field["anyOf"])))
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of ({_kind(field.get('items', {}))})"
    return str(field.get("type", "any"))
