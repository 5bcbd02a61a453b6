"""Attacks on the index of packages and on what a run keeps of it, over a real server: every one is refused.

What is counted: `test_there_are_more_than_a_hundred_attacks`.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from wheels import push_body, wheel
from whole_way import Control
from wrong_wheels import WRONG

from tandem.client import PackageIndex, Tandem
from tandem.env.load import ADAPTERS, BUILT_IN
from tandem.errors import ControlError, ControlNotKnown, RunError, SpecError
from tandem.io.provenance import Signer, checked_statement
from tandem.runs.environment_packages import PINS, install_kept, keep_packages

VICTIM, EVIL = wheel("acme-shout"), wheel("acme-shout", code="class Shout:\n    tasks = run = print\n")
NAME = "acme/shout==1.0"


class Attacked:
    """A real server with an org `acme`, its package, and an org `evil`."""

    def __init__(self, home: Path) -> None:
        self.control, self.home = Control(home), home
        acme, evil = (self.control.ask("POST", "/api/orgs", {"name": name})["id"] for name in ("acme", "evil"))
        self.acme = self.control.key("env", "runs:read", org=acme)
        self.evil = self.control.key("env", "runs:read", org=evil)
        self.url = f"http://127.0.0.1:{self.control.port}"
        told = self.push(VICTIM, self.acme)
        if told.status_code != 201:
            self.control.close()
        assert told.status_code == 201, told.text

    def push(self, made: tuple[str, bytes], key: str, **more: Any) -> httpx.Response:
        return self.send("POST", "/api/packages", key, push_body(made) | more)

    def send(self, method: str, path: str, key: str, body: Any = None, **headers: str) -> httpx.Response:
        sent = {"Authorization": f"Bearer {key}", "Idempotency-Key": os.urandom(8).hex(), **headers}
        return httpx.request(method, f"{self.url}{path}", json=body, headers=sent, timeout=30)

    def index(self, url: str = "") -> PackageIndex:
        def get(path: str, headers: Mapping[str, str]) -> bytes:
            with Tandem(url or self.url, self.acme, patience_s=2.0) as server:
                return server.answered("GET", f"/simple/{path}", headers=headers).content

        return PackageIndex(get, "the index")

    @property
    def signing_key(self) -> str:
        return (self.home / "data/signing-key.pub").read_text().strip()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    made = Attacked(tmp_path_factory.mktemp("attacked"))
    before = made.send("GET", "/api/packages", made.acme).json()
    yield made
    assert made.send("GET", "/api/packages", made.acme).json() == before  # not one attack has left a trace
    assert made.send("GET", "/api/packages", made.evil).json()["items"] == []
    made.control.close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# --- pushed

BODIES: dict[str, dict[str, Any]] = {
    "another sha256": {"sha256": "0" * 64},
    "no base 64": {"wheel": "not base 64 !"},
    "too large": {"wheel": base64.b64encode(b"PK\x03\x04" + b"0" * (8 * 2**20)).decode()},
    "a path as a file": {"file": "../../x.whl"},
    "a field more": {"yanked": True},
    "a project of another org": {"project": "nowhere"},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_wheel(world: Attacked, name: str):
    file, content = WRONG[name][0]()
    made = file.replace("default_", "acme_"), content
    assert world.push(made, world.acme).status_code in (409, 413, 422)


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_request(world: Attacked, name: str):
    told = world.push(wheel("acme-new"), world.acme, **BODIES[name])
    assert told.status_code in (404, 413, 422), told.text


OTHERS = ["acme-shout", "Acme.Shout", "ACME_shout", "acme--shout", "acme-new", "acme", "shout", "evilshout"]
ALIKE = ["acme-sh0ut", "acme-5hout", "acme-s-hout", "Acme_Sh-out", "acmeshout", "acme.s.h.o.u.t", "acme"]
OURS = [f"acme-{name}" for name in (*BUILT_IN, *ADAPTERS, "tandem", "s0rt", "verlfiers", "Reasoning.Gym")]
ORGS = ["Acme", "acrne", "ac-me", "acme ", "ACME_"]


@pytest.mark.parametrize("name", OTHERS)
def test_a_name_of_another_org(world: Attacked, name: str):
    assert world.push(wheel(name, "9.0"), world.evil).status_code in (409, 422)


@pytest.mark.parametrize("name", [*ALIKE, *OURS])
def test_a_name_that_looks_like_another(world: Attacked, name: str):
    assert world.push(wheel(name, "9.0"), world.acme).status_code in (409, 422)


@pytest.mark.parametrize("name", ORGS)
def test_an_org_that_looks_like_another(world: Attacked, name: str):
    org = world.control.ask("POST", "/api/orgs", {"name": name})["id"]
    told = world.push(wheel(f"{name.strip(' _')}-shout", "9.0"), world.control.key("env", org=org))
    assert told.status_code in (409, 422), told.text


@pytest.mark.parametrize(
    ("version", "code"), [("1.0", "other = 1"), ("1.0.0", "other = 2"), ("1", "other = 3"), ("1.0.0.0", "other = 4")]
)
def test_another_file_under_a_version(world: Attacked, version: str, code: str):
    assert world.push(wheel("acme-shout", version, code=code), world.acme).status_code == 409


# --- asked by those who may not

PATHS = ["/simple/acme-shout/", f"/simple/acme-shout/{VICTIM[0]}", f"/simple/acme-shout/{VICTIM[0]}.provenance",
         "/api/packages/acme-shout"]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("who", ["evil", "nobody", "chat"])
def test_a_caller_who_may_not_see_it(world: Attacked, path: str, who: str):
    key = {"evil": world.evil, "nobody": "tdm_x_y", "chat": world.control.key("chat")}[who]
    told = world.send("GET", path, key)
    assert told.status_code == {"evil": 404, "nobody": 401, "chat": 403}[who]
    assert VICTIM[1] not in told.content


@pytest.mark.parametrize("key", ["evil", "reader"])
def test_a_yank_by_another(world: Attacked, key: str):
    used = world.evil if key == "evil" else world.control.key("runs:read")
    told = world.send("POST", "/api/packages/acme-shout/yank", used, {"version": "1.0"})
    assert told.status_code in (403, 404)


@pytest.mark.parametrize("name", ["..%2f..%2ftoken", "..%2ftoken", "%00", VICTIM[0] + ".metadata.metadata", "token"])
def test_a_path_that_leads_elsewhere(world: Attacked, name: str):
    told = world.send("GET", f"/simple/acme-shout/{name}", world.acme)
    assert told.status_code == 404
    assert world.control.token not in told.text


# --- on the way


class Liar:
    """A proxy that changes what the index answers: `change(path, content)`."""

    def __init__(self, url: str, change: Callable[[str, bytes], bytes]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                passed = ("Authorization", "Accept")
                headers = {name: self.headers[name] for name in passed if self.headers[name]}
                told = httpx.get(f"{url}{self.path}", headers=headers, timeout=20)
                content = change(self.path, told.content)
                self.send_response(told.status_code)
                self.send_header("Content-Type", told.headers["content-type"])
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def flipped(at: int) -> Callable[[str, bytes], bytes]:
    def change(path: str, content: bytes) -> bytes:
        if not path.endswith(".whl"):
            return content
        place = at * (len(content) - 1) // 20
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    return change


def replaced(path: str, content: bytes) -> bytes:
    """Another wheel with another hash: all that an index can lie about."""
    if path.endswith(".whl"):
        return EVIL[1]
    return content.replace(_sha(VICTIM).encode(), _sha(EVIL).encode())


def _sha(made: tuple[str, bytes]) -> str:
    return hashlib.sha256(made[1]).hexdigest()


def _page(**changes: Any) -> Callable[[str, bytes], bytes]:
    def change(path: str, content: bytes) -> bytes:
        if not path.endswith("/"):
            return content
        page = json.loads(content)
        page["files"][0] |= changes
        return json.dumps(page).encode()

    return change


LIES: dict[str, Callable[[str, bytes], bytes]] = {
    **{f"byte {at} of 20 changed": flipped(at) for at in range(21)},
    "cut off": lambda path, content: content[:-1] if path.endswith(".whl") else content,
    "longer": lambda path, content: content + b"\0" if path.endswith(".whl") else content,
    "another wheel": lambda path, content: EVIL[1] if path.endswith(".whl") else content,
    "another wheel and its hash": replaced,
    "no hash": _page(hashes={}),
    "md5 alone": _page(hashes={"md5": "0" * 32}),
    "another hash": _page(hashes={"sha256": "0" * 64}),
    "a file of another name": _page(filename="torch-9.0-py3-none-any.whl"),
    "a file with a path": _page(filename="../acme_shout-1.0-py3-none-any.whl"),
    "a page of another name": lambda path, content: content.replace(b'"acme-shout"', b'"torch"'),
    "no page": lambda path, content: b"<html>" if path.endswith("/") else content,
}


@pytest.mark.parametrize("name", LIES)
def test_what_is_changed_on_the_way_is_not_kept(world: Attacked, tmp_path: Path, name: str):
    with Liar(world.url, LIES[name]) as liar:
        with pytest.raises((SpecError, ControlError)):
            keep_packages([NAME], world.index(liar.url), tmp_path / "kept", world.signing_key)
    assert not (tmp_path / "kept").exists()


def test_a_place_that_the_page_names_is_not_asked(world: Attacked, tmp_path: Path):
    asked: list[str] = []
    with Liar(world.url, lambda path, content: asked.append(path) or content) as elsewhere:
        lie = _page(url=f"{elsewhere.url}/simple/acme-shout/{VICTIM[0]}")
        with Liar(world.url, lie) as liar:
            keep_packages([NAME], world.index(liar.url), tmp_path / "kept", world.signing_key)
    assert asked == []


def install(tool: str, url: str, key: str, target: Path, *wanted: str) -> subprocess.CompletedProcess[str]:
    """Install from an index with pip or uv, as a user would."""
    index = f"{url.replace('://', f'://me:{key}@')}/simple/"
    command = {
        "pip": ["-I", "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "--no-input"],
        "uv": ["-m", "uv", "pip", "install", "--no-config", "--no-cache", "--python", sys.executable],
    }[tool]  # fmt: skip
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    words = [sys.executable, *command, "--no-deps", "--index-url", index, "--target", str(target), *wanted]
    return subprocess.run(words, capture_output=True, text=True, env=given, timeout=120)


DIFFERS = {"pip": "DO NOT MATCH THE HASHES", "uv": "Hash mismatch"}
TOOLS = sorted(DIFFERS)


def test_pip_and_uv_get_the_same_bytes(world: Attacked, tmp_path: Path):
    got: dict[str, list[str]] = {}
    for tool in TOOLS:

        def noted(path: str, content: bytes, tool: str = tool) -> bytes:
            if path.endswith(".whl"):
                got.setdefault(tool, []).append(hashlib.sha256(content).hexdigest())
            return content

        with Liar(world.url, noted) as proxy:
            told = install(tool, proxy.url, world.acme, tmp_path / tool, "acme-shout")
        assert told.returncode == 0, told.stderr
    assert got == {tool: [_sha(VICTIM)] for tool in TOOLS}
    assert (tmp_path / "pip/shout_env.py").read_bytes() == (tmp_path / "uv/shout_env.py").read_bytes()


@pytest.mark.parametrize("at", [3, 10, 17])
@pytest.mark.parametrize("tool", TOOLS)
def test_pip_and_uv_refuse_what_is_changed_on_the_way(world: Attacked, tmp_path: Path, tool: str, at: int):
    with Liar(world.url, flipped(at)) as liar:
        told = install(tool, liar.url, world.acme, tmp_path / "site", "acme-shout==1.0")
    assert told.returncode != 0
    assert not (tmp_path / "site" / "shout_env.py").exists()
    # uv unpacks while the bytes arrive: it finds the zip file damaged before it has its hash
    assert {"pip": DIFFERS["pip"], "uv": "Failed to extract archive"}[tool] in told.stderr


@pytest.mark.parametrize("tool", TOOLS)
def test_a_wheel_that_is_none_of_the_index_is_refused_by_its_hash(world: Attacked, tmp_path: Path, tool: str):
    """With the hash of the index where the wheel alone was changed; with the pinned one where the index lies, too."""
    with Liar(world.url, LIES["another wheel"]) as liar:
        told = install(tool, liar.url, world.acme, tmp_path / "a", "acme-shout==1.0")
        assert (told.returncode != 0, DIFFERS[tool] in told.stderr) == (True, True), told.stderr
    (tmp_path / "pins.txt").write_text(f"acme-shout==1.0 --hash=sha256:{_sha(VICTIM)}\n")
    pinned = ["--require-hashes", "-r", str(tmp_path / "pins.txt")]
    with Liar(world.url, replaced) as liar:
        told = install(tool, liar.url, world.acme, tmp_path / "b", *pinned)
        assert (told.returncode != 0, DIFFERS[tool] in told.stderr) == (True, True), told.stderr
    told = install(tool, world.url, world.acme, tmp_path / "c", *pinned)
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("tool", TOOLS)
def test_a_yanked_version_is_installed_by_its_number_alone(world: Attacked, tmp_path: Path, tool: str):
    def yank(undo: bool) -> None:
        body = {"version": "1.0", "why": "wrong rewards", "undo": undo}
        assert world.send("POST", "/api/packages/acme-shout/yank", world.acme, body).status_code == 200

    yank(False)
    try:
        assert install(tool, world.url, world.acme, tmp_path / "a", "acme-shout").returncode != 0
        told = install(tool, world.url, world.acme, tmp_path / "b", "acme-shout==1.0")
        assert (told.returncode, "wrong rewards" in told.stderr) == (0, True), told.stderr
    finally:
        yank(True)


# --- signatures

SIGNATURES: dict[str, Callable[[dict[str, Any], Signer], Any]] = {
    "another key": lambda envelope, evil: evil.envelope(VICTIM[0], _sha(VICTIM), {}),
    "another key under our id": lambda envelope, evil: {
        **evil.envelope(VICTIM[0], _sha(VICTIM), {}),
        "signatures": [evil.envelope(VICTIM[0], "", {})["signatures"][0] | {"keyid": _id_of(envelope)}],
    },
    "a changed payload": lambda envelope, _: {**envelope, "payload": _changed(envelope, b"acme/shout", b"evil/shout")},
    "a changed digest": lambda envelope, _: {
        **envelope, "payload": _changed(envelope, _sha(VICTIM).encode(), _sha(EVIL).encode()),
    },
    "a changed type": lambda envelope, _: {**envelope, "payloadType": "text/plain"},
    "no signature": lambda envelope, _: {**envelope, "signatures": []},
    "an empty signature": lambda envelope, _: {**envelope, "signatures": [{"sig": ""}]},
    "half a signature": lambda envelope, _: {
        **envelope, "signatures": [{"sig": envelope["signatures"][0]["sig"][:44]}],
    },
    "a signature over the plain payload": lambda envelope, evil: {
        **envelope, "signatures": [{"sig": base64.b64encode(b"\0" * 64).decode()}],
    },
    "no base 64": lambda envelope, _: {**envelope, "payload": "%%%"},
    "nothing": lambda envelope, _: {},
    "a list": lambda envelope, _: [envelope],
    "a text": lambda envelope, _: "signed",
    "of another file": lambda envelope, _: "other file",
}  # fmt: skip


def _id_of(envelope: Mapping[str, Any]) -> str:
    return envelope["signatures"][0]["keyid"]


def _changed(envelope: Mapping[str, Any], old: bytes, new: bytes) -> str:
    payload = base64.b64decode(envelope["payload"])
    assert old in payload
    return base64.b64encode(payload.replace(old, new)).decode()


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_wrong_signature(world: Attacked, name: str):
    right = json.loads(world.send("GET", f"/simple/acme-shout/{VICTIM[0]}.provenance", world.acme).content)
    key = world.signing_key
    assert checked_statement(right, key, VICTIM[0], _sha(VICTIM))["package"] == "acme/shout"
    wrong = SIGNATURES[name](copy.deepcopy(right), Signer(b"evil" * 8))
    about = _sha(EVIL) if name in ("of another file", "a changed digest") else _sha(VICTIM)
    with pytest.raises(SpecError):
        checked_statement(right if wrong == "other file" else wrong, key, VICTIM[0], about)


# --- dependency confusion


@pytest.mark.parametrize(
    "how", ["PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONFIG_FILE", "wheel here"]
)
def test_a_higher_version_elsewhere_is_not_taken(
    world: Attacked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    file, trap = wheel("acme-shout", "9.0", code="trapped = True\nclass Shout: tasks = run = 1\n")
    (tmp_path / file).write_bytes(trap)
    (tmp_path / "pip.conf").write_text(f"[install]\nfind-links = {tmp_path}\n[global]\npre = true\n")
    if how == "wheel here":
        monkeypatch.chdir(tmp_path)
    else:
        value = {"PIP_FIND_LINKS": tmp_path, "PIP_CONFIG_FILE": tmp_path / "pip.conf"}.get(how, f"file://{tmp_path}")
        monkeypatch.setenv(how, str(value))
    keep_packages(["acme/shout"], world.index(), tmp_path / "kept", world.signing_key)
    site = install_kept(tmp_path / "kept", ["acme/shout"]).site
    assert "trapped" not in (site / "shout_env.py").read_text()


@pytest.mark.parametrize(
    "requires",
    ["acme-parts", "Acme.Parts>=1", "acme_parts[x]", "pytest @ http://127.0.0.1:9/x.whl", "nowhere-to-be-had"],
)
def test_a_requirement_is_not_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requires: str):
    """What has the org's name is not taken of this machine, and nothing is fetched that the index has not."""
    installed = tmp_path / "acme_parts-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: acme-parts\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    file, content = wheel("acme-shout", requires=(requires,))

    def get(path: str, _: Mapping[str, str]) -> bytes:
        if path.startswith("acme-shout/acme_shout"):
            return content
        if path != "acme-shout/":
            raise ControlNotKnown("nothing")
        files = [{"filename": file, "url": file, "hashes": {"sha256": hashlib.sha256(content).hexdigest()}}]
        return json.dumps({"name": "acme-shout", "files": files}).encode()

    with pytest.raises(SpecError):
        keep_packages([NAME], PackageIndex(get, "the index"), tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


# --- what a run has kept


def _pins(change: Callable[[dict[str, Any]], object]) -> Callable[[Path, Path], None]:
    def changed(kept: Path, _: Path) -> None:
        pins = json.loads((kept / PINS).read_text())
        change(pins)
        (kept / PINS).write_text(json.dumps(pins))

    return changed


def _site(change: Callable[[Path], object]) -> Callable[[Path, Path], None]:
    return lambda kept, site: change(site) and None


KEPT: dict[str, Callable[[Path, Path], object]] = {
    "another wheel": lambda kept, _: (kept / VICTIM[0]).write_bytes(EVIL[1]),
    "a byte more": lambda kept, _: (kept / VICTIM[0]).write_bytes(VICTIM[1] + b"\0"),
    "no wheel": lambda kept, _: (kept / VICTIM[0]).unlink(),
    "no pins": lambda kept, _: (kept / PINS).unlink(),
    "pins that are none": lambda kept, _: (kept / PINS).write_text("{}"),
    "another hash": _pins(lambda pins: pins["packages"][0].update(sha256="0" * 64)),
    "another version": _pins(lambda pins: pins["packages"][0].update(version="2.0")),
    "another name": _pins(lambda pins: pins["packages"][0].update(name="torch")),
    "another title": _pins(lambda pins: pins.update(environments={"evil/shout": {"version": "1.0"}})),
    "a package of this machine gone": _pins(lambda pins: pins.update(machine={"nowhere": "1"})),
    "installed code changed": _site(lambda site: (site / "shout_env.py").write_text("trap = True")),
    "installed code more": _site(lambda site: (site / "torch.py").write_text("trap = True")),
    "a hook more": _site(lambda site: (site / "trap.pth").write_text("import os")),
    "installed code gone": _site(lambda site: (site / "shout_env.py").unlink() or True),
    "a link": _site(lambda site: (site / "more.py").symlink_to("/etc/passwd") or True),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_was_changed_in_a_run_or_its_cache_does_not_play(world: Attacked, tmp_path: Path, name: str):
    keep_packages([NAME], world.index(), kept := tmp_path / "kept", world.signing_key)
    KEPT[name](kept, install_kept(kept, [NAME]).site)
    with pytest.raises((RunError, SpecError)):
        install_kept(kept, [NAME])


def test_there_are_more_than_a_hundred_attacks(request: pytest.FixtureRequest):
    here = [each for each in request.session.items if each.path == request.path]
    assert len(here) - 5 > 150, len(here)  # but for this one, the lie that does nothing, bytes and yanks of pip and uv
