"""Pages for people at GET /: of each service one file, without a number in it.

A browser sends no token when it loads a page, so the page is open to all, and empty. It asks for the token, keeps it
for as long as its tab is open, and fetches what it shows with it, as any client does. What it shows was written by
environments, users and models: its policy lets no script run but its own, no request leave for elsewhere, and no text
become markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from fastapi.responses import Response

from tandem.serve.http.openapi_document import PAGE, speaks


def page(file: str) -> Callable[[], Awaitable[Response]]:
    """A route that answers with one of the .html files beside this one."""

    @speaks(answers=(PAGE,))
    async def answer() -> Response:
        body, headers = _page(file)
        return Response(body, media_type="text/html", headers=headers)

    return answer


@cache
def _page(file: str) -> tuple[bytes, dict[str, str]]:
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _digests(text, "script"),
        "style-src": _digests(text, "style"),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return text.encode(), {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Vary": "Accept",
    }


def _digests(text: str, tag: str) -> str:
    """What stands in the file's own elements, and nothing else, may run or style it."""
    inside = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert inside, f"the page has no <{tag}>"
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in inside)
