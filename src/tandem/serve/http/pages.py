"""Web pages at GET /, one static file per service, without data in it.

A browser sends no token when it loads a page, so the page is open to all and contains no data. It asks for the token,
keeps it while its tab is open, and fetches its data with it, as any client does. Environments, users and models wrote
that data. So the page's policy runs only its own script, allows no request to other servers, and never treats text as
markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from fastapi.responses import Response

from tandem.obs.look import LOOK
from tandem.serve.http.openapi_document import PAGE, speaks

_LOOK = "/* look.css */"
"""In a page's <style>: where the look of all pages goes."""


def page(file: str) -> Callable[[], Awaitable[Response]]:
    """Return a route that serves one of the .html files in this folder."""

    @speaks(answers=(PAGE,))
    async def answer() -> Response:
        body, headers = _page(file)
        return Response(body, media_type="text/html", headers=headers)

    return answer


@cache
def _page(file: str) -> tuple[bytes, dict[str, str]]:
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    assert _LOOK in text, f"{file} does not take the look of all pages"
    text = text.replace(_LOOK, LOOK.read_text(encoding="utf-8"))
    return text.encode(), {
        **page_headers(_digests(text, "script"), _digests(text, "style")),
        "Cache-Control": "no-store",
    }


def page_headers(scripts: str, styles: str, images: str = "") -> dict[str, str]:
    """Return the headers of a page that runs only these scripts and asks only its own server."""
    policy = {
        "default-src": "'none'",
        "script-src": scripts,
        "style-src": styles,
        **({"img-src": images} if images else {}),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Vary": "Accept",
    }


def _digests(text: str, tag: str) -> str:
    """Return the digests of the file's own elements of this tag; the policy allows no others."""
    inside = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert inside, f"the page has no <{tag}>"
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in inside)
