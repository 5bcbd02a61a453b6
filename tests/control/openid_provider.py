"""A real OpenID provider for tests, as a process of its own: authlib's server over HTTP, with PKCE required, one public
client, and refresh tokens that work once. Its person is always willing: the sign-in page sends the browser on at once.

`python openid_provider.py DIRECTORY`: writes DIRECTORY/url, and reads who the person is from DIRECTORY/person.json at
each ID token.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

CLIENT = "tandem-test"


def main(directory: Path) -> None:
    os.environ["AUTHLIB_INSECURE_TRANSPORT"] = "1"  # it is on this machine only
    from authlib.oauth2 import AuthorizationServer, OAuth2Request
    from authlib.oauth2.rfc6749 import ClientMixin
    from authlib.oauth2.rfc6749.grants import AuthorizationCodeGrant, RefreshTokenGrant
    from authlib.oauth2.rfc6749.requests import BasicOAuth2Payload
    from authlib.oauth2.rfc6750 import BearerTokenGenerator
    from authlib.oauth2.rfc7636 import CodeChallenge
    from authlib.oidc.core import OpenIDCode
    from authlib.oidc.core.grants import OpenIDToken
    from joserfc.jwk import RSAKey

    key = RSAKey.generate_key(2048, {"kid": "first", "use": "sig", "alg": "RS256"})
    codes: dict[str, Any] = {}
    refreshed: dict[str, Any] = {}
    person = SimpleNamespace(id="person")

    class Client(ClientMixin):
        def get_client_id(self) -> str:
            return CLIENT

        def get_allowed_scope(self, scope: str) -> str:
            return scope

        def check_redirect_uri(self, redirect_uri: str) -> bool:
            return urlsplit(redirect_uri).hostname == "127.0.0.1"

        def check_endpoint_auth_method(self, method: str, endpoint: str) -> bool:
            return method == "none"

        def check_response_type(self, response_type: str) -> bool:
            return response_type == "code"

        def check_grant_type(self, grant_type: str) -> bool:
            return True

    class Request(OAuth2Request):
        def __init__(self, method: str, uri: str, told: dict[str, str]) -> None:
            super().__init__(method, uri)
            self.payload, self.told = BasicOAuth2Payload(told), told

        @property
        def args(self) -> dict[str, str]:
            return self.told

        @property
        def form(self) -> dict[str, str]:
            return self.told

    class Provider(AuthorizationServer):
        def query_client(self, client_id: str) -> Client | None:
            return Client() if client_id == CLIENT else None

        def save_token(self, token: dict[str, Any], request: Any) -> None:
            if "refresh_token" in token:
                scope = token["scope"]
                refreshed[token["refresh_token"]] = SimpleNamespace(
                    check_client=lambda client: True, get_scope=lambda: scope
                )

        def create_oauth2_request(self, request: Request) -> Request:
            return request

        def handle_response(self, status: int, body: Any, headers: Any) -> tuple[int, Any, Any]:
            return status, body, headers

        def send_signal(self, name: str, *args: Any, **more: Any) -> None:
            pass

    class IdToken(OpenIDToken):
        def resolve_client_private_key(self, client: Any) -> Any:
            return key

        def get_encode_header(self, client: Any) -> dict[str, str]:
            return {"alg": "RS256", "kid": "first"}

        def get_client_algorithm(self, client: Any) -> str:
            return "RS256"

        def get_client_claims(self, client: Any) -> dict[str, str]:
            return {"iss": url, "jti": secrets.token_hex(8)}

        def generate_user_info(self, user: Any, scope: str) -> dict[str, Any]:
            return json.loads((directory / "person.json").read_text())

    class CodeIdToken(IdToken, OpenIDCode):
        def exists_nonce(self, nonce: str, request: Any) -> bool:
            return False

    class Codes(AuthorizationCodeGrant):
        TOKEN_ENDPOINT_AUTH_METHODS = ["none"]  # noqa: RUF012 - as authlib has it

        def save_authorization_code(self, code: str, request: Any) -> None:
            told = request.payload.data
            codes[code] = SimpleNamespace(
                code=code, code_challenge=told.get("code_challenge"),
                code_challenge_method=told.get("code_challenge_method"), get_scope=lambda: told["scope"],
                get_redirect_uri=lambda: told["redirect_uri"], get_nonce=lambda: told.get("nonce"),
                get_auth_time=lambda: None, get_acr=lambda: None, get_amr=lambda: None,
            )  # fmt: skip

        def query_authorization_code(self, code: str, client: Any) -> Any:
            return codes.get(code)

        def delete_authorization_code(self, authorization_code: Any) -> None:
            del codes[authorization_code.code]

        def authenticate_user(self, authorization_code: Any) -> Any:
            return person

    class Refreshes(RefreshTokenGrant):
        TOKEN_ENDPOINT_AUTH_METHODS = ["none"]  # noqa: RUF012
        INCLUDE_NEW_REFRESH_TOKEN = True

        def authenticate_refresh_token(self, refresh_token: str) -> Any:
            return refreshed.pop(refresh_token, None)

        def authenticate_user(self, refresh_token: Any) -> Any:
            return person

        def revoke_old_credential(self, refresh_token: Any) -> None:
            pass

    provider = Provider()
    make = lambda **_: secrets.token_urlsafe(32)  # noqa: E731
    provider.register_token_generator("default", BearerTokenGenerator(make, make))
    provider.register_grant(Codes, [CodeChallenge(required=True), CodeIdToken()])
    provider.register_grant(Refreshes, [IdToken()])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            if asked.path == "/.well-known/openid-configuration":
                ends = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "jwks"}
                self._answer(200, {"issuer": url, **{name: f"{url}/{end}" for name, end in ends.items()}}, [])
            elif asked.path == "/jwks":
                self._answer(200, {"keys": [key.as_dict(private=False)]}, [])
            else:
                request = Request("GET", f"{url}{self.path}", dict(parse_qsl(asked.query)))
                grant = provider.get_consent_grant(request, person)
                self._answer(*provider.create_authorization_response(request, person, grant))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._answer(*provider.create_token_response(Request("POST", f"{url}/token", dict(parse_qsl(body)))))

        def _answer(self, status: int, body: Any, headers: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    (directory / "url.part").write_text(url)
    (directory / "url.part").replace(directory / "url")
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
