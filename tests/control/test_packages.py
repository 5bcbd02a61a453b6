"""Environments as packages: what is pushed never changes, names have one owner, and what is fetched is checked."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import tomli_w
from plane import SPEC, Served, served
from wheels import CODE, push_body, wheel

from tandem.client import PackageIndex
from tandem.control.audit import audit_rows
from tandem.errors import ControlNotKnown, RunError, SpecError
from tandem.io.provenance import KEY_FILE, Signer, read_signer
from tandem.io.wheel_file import open_wheel
from tandem.runs.environment_packages import PINS, install_kept, keep_packages
from tandem.shapes.packages import SIMPLE_JSON
from tandem.spec.environment import part_labels
from tandem.spec.load import parse_spec
from tandem.spec.package_names import normalized, package_name, skeleton, version_key
from tandem.spec.run import RlSpec

NAME = "default/shout==1.0"


ON_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
"""For tests to which the database is nothing: PostgreSQL would only take its time."""


@pytest.fixture
def plane(tmp_path: Path, database: str) -> Iterator[Served]:
    made = served(tmp_path, database)
    yield made
    made.plane.store.close()


def index_of(plane: Served, key: str = "") -> PackageIndex:
    def get(path: str, headers: Mapping[str, str]) -> bytes:
        more = {} if not key else {"key": key}
        answer = plane.ask("GET", f"/simple/{path}", **more, **headers)
        if answer.status_code == 404:
            raise ControlNotKnown(answer.text)
        assert answer.status_code == 200, answer.text
        return answer.content

    return PackageIndex(get, "the index")


def pushed(plane: Served, *made: tuple[str, bytes]) -> None:
    for each in made:
        plane.made("/api/packages", push_body(each))


# --- names and versions


def test_a_name_is_one_however_it_is_written():
    assert {normalized(name) for name in ("Acme_Shout", "acme-shout", "ACME.shout", "acme--shout")} == {"acme-shout"}
    assert package_name("Acme/Word_Count==1.2.0rc1").distribution == "acme-word-count"
    alike = ["acme-shout", "acme-sh0ut", "acmeshout", "acrne-shout", "Acme.Sh0ut"]
    assert len({skeleton(each) for each in alike}) == 1
    assert len({skeleton(each) for each in ("acme-shout", "acme-shot", "acme-math6", "acme-math9")}) == 4
    for wrong in ("acme", "acme/", "/shout", "acme/shout==", "acme/shout==v1", "acme/shout>=1", "a/b/c"):
        with pytest.raises(SpecError):
            package_name(wrong)


def test_versions_sort_as_pip_sorts_them():
    from packaging.version import Version

    ordered = [
        "1.0.dev1",
        "1.0a1",
        "1.0a2.dev3",
        "1.0a2",
        "1.0b1",
        "1.0rc1",
        "1.0",
        "1.0.post1",
        "1.0.1",
        "1.9",
        "1.10",
    ]
    assert sorted(ordered, key=version_key) == sorted(ordered, key=Version)
    assert version_key("1.0") == version_key("1.0.0") == version_key("1")


# --- push


def test_a_wheel_is_listed_and_comes_back_as_it_was(plane: Served):
    file, content = wheel()
    pushed(plane, (file, content))
    (found,) = plane.ask("GET", "/api/packages").json()["items"]
    (version,) = found["versions"]
    assert (found["title"], version["version"], version["environments"]) == (
        "default/shout", "1.0", {"shout": "shout_env:Shout"},
    )  # fmt: skip
    assert plane.ask("GET", f"/simple/default-shout/{file}").content == content


def test_the_index_speaks_html_and_json_and_tells_of_metadata_and_yanks(plane: Served):
    made = wheel()
    pushed(plane, made, wheel(version="1.1"))
    plane.made("/api/packages/default-shout/yank", {"version": "1.1", "why": 'scores <"wrong">'})
    page = plane.ask("GET", "/simple/Default_Shout/", Accept="text/html")
    assert page.headers["content-type"].startswith("text/html")
    told = open_wheel(*made)
    assert f'href="{made[0]}#sha256={told.sha256}"' in page.text
    assert f'data-core-metadata="sha256={told.metadata_sha256}"' in page.text
    assert 'data-requires-python="&gt;=3.11"' in page.text
    assert 'data-yanked="scores &lt;&quot;wrong&quot;&gt;"' in page.text
    as_json = plane.ask("GET", "/simple/default-shout/", Accept=f"{SIMPLE_JSON}, text/html; q=0.1")
    assert as_json.headers["content-type"] == SIMPLE_JSON
    first, second = as_json.json()["files"]
    assert (first["yanked"], second["yanked"]) == (False, 'scores <"wrong">')
    assert plane.ask("GET", f"/simple/default-shout/{made[0]}.metadata").content == told.metadata
    assert first["core-metadata"] == {"sha256": told.metadata_sha256}
    assert plane.ask("GET", "/simple/", Accept=SIMPLE_JSON).json()["projects"] == [{"name": "default-shout"}]


@ON_SQLITE
def test_pip_sends_the_key_as_a_password(plane: Served):
    pushed(plane, wheel())
    reader, chatter = plane.key("runs:read"), plane.key("chat")

    def asked(password: str, path: str = "/simple/default-shout/") -> int:
        told = base64.b64encode(f"any name:{password}".encode()).decode()
        return plane.ask("GET", path, Authorization=f"Basic {told}").status_code

    assert [asked(reader), asked(chatter), asked("wrong"), asked("")] == [200, 403, 401, 401]
    assert asked(reader, "/api/packages") == 401  # a password opens the index alone
    assert plane.ask("GET", "/simple/", Authorization="Basic %%%").status_code == 401


def test_a_version_never_changes(plane: Served):
    first, other = wheel(), wheel(code="class Shout: tasks = run = 1\n")
    assert plane.ask("POST", "/api/packages", body=push_body(first)).status_code == 201
    assert plane.ask("POST", "/api/packages", body=push_body(first)).status_code == 201  # the same bytes: a no-op
    for changed in (other, wheel(version="1.0.0"), wheel(version="1")):
        told = plane.ask("POST", "/api/packages", body=push_body(changed))
        assert (told.status_code, "never change" in told.text) == (409, True), told.text
    plane.made("/api/packages/default-shout/yank", {"version": "1.0"})
    assert plane.ask("POST", "/api/packages", body=push_body(other)).status_code == 409
    assert plane.ask("GET", f"/simple/default-shout/{first[0]}").content == first[1]  # yanked, and still there
    actions = [row.action for row in asyncio.run(plane.plane.store.read(lambda s: audit_rows(s, [plane.org], 0, 100)))]
    assert actions.count("POST /api/packages") == 2
    assert "POST /api/packages/{id}/yank" in actions


@ON_SQLITE
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shout", "begins with 'default-'"), ("acme-shout", "begins with 'default-'"),
        ("default", "begins with 'default-'"), ("default-sh0ut", "looks like the name of a package"),
        ("default-s-h-o-u-t", "looks like the name of a package"), ("default-sort", "an environment of Tandem's own"),
        ("default-Gsm8k", "environment of Tandem's own"), ("default-reasoning-gym", "environment of Tandem's own"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_ones_own_is_refused(plane: Served, name: str, says: str):
    pushed(plane, wheel())
    told = plane.ask("POST", "/api/packages", body=push_body(wheel(name)))
    assert (told.status_code, says in told.text) == (409, True), told.text


def test_the_first_of_two_orgs_that_look_alike_has_the_prefix(plane: Served):
    first = plane.made("/api/orgs", {"name": "Acme"})["id"]
    plane.now[0] += 1
    second = plane.made("/api/orgs", {"name": "acrne"})["id"]
    keys = [plane.key("env", "runs:read", org=org) for org in (first, second)]
    for number, (key, name) in enumerate(zip(keys, ("acme-shout", "acrne-other"), strict=True)):
        told = plane.ask("POST", "/api/packages", key, push_body(wheel(name)))
        assert told.status_code == (201, 409)[number], told.text
    assert plane.ask("GET", "/api/packages/acme-shout", keys[1]).status_code == 404


def test_a_key_of_a_project_sees_and_changes_no_others(plane: Served):
    plane.made("/api/projects", {"name": "p"})
    plane.made("/api/packages", push_body(wheel(), project="p"))
    inside, outside = plane.key("env", "runs:read", project="p"), plane.key("env", "runs:read", project="default")
    path = "/api/packages/default-shout"
    assert [plane.ask("GET", path, key).status_code for key in (inside, outside)] == [200, 404]
    assert plane.ask("POST", f"{path}/yank", outside, {"version": "1.0"}).status_code == 404
    assert plane.ask("POST", "/api/packages", outside, push_body(wheel(version="2"))).status_code == 409
    pushed(plane, wheel("default-all"))
    assert plane.ask("POST", "/api/packages/default-all/yank", inside, {"version": "1.0"}).status_code == 409


@ON_SQLITE
def test_a_wheel_that_was_changed_on_the_servers_disk_is_not_given_out(plane: Served):
    file, content = wheel()
    pushed(plane, (file, content))
    kept = plane.plane.shelf.path(open_wheel(file, content).sha256)
    kept.write_bytes(content[:-1] + b"x")
    answer = plane.ask("GET", f"/simple/default-shout/{file}")
    assert (answer.status_code, content[:20] in answer.content) == (500, False)


def test_an_agent_gets_what_its_runs_project_sees_while_it_is_claimed(plane: Served):
    made = wheel()
    pushed(plane, made)
    attempt, token = plane.open_attempt(plane.submit())
    path = f"/api/attempts/{attempt}/simple/default-shout/"
    assert plane.ask("GET", path, token).status_code == 409  # not claimed yet
    plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)
    assert plane.ask("GET", path, token, Accept=SIMPLE_JSON).json()["files"][0]["filename"] == made[0]
    assert plane.ask("GET", path + made[0], token).content == made[1]
    assert plane.ask("GET", path, plane.key("runs:read")).status_code == 401
    other = plane.made("/api/orgs", {"name": "other"})["id"]
    run = plane.submit(plane.key("runs:write", "runs:read", org=other))
    foreign, its_token = plane.open_attempt(run)
    plane.made(f"/api/attempts/{foreign}/claim", {"instance": "i"}, its_token)
    assert plane.ask("GET", path.replace(attempt, foreign), its_token).status_code == 404
    assert plane.ask("GET", path, its_token).status_code == 404


def spec_with(*names: str, **more: str) -> str:
    tables = tomllib.loads(SPEC) | {"environment": [{"name": each, **more} for each in names]}
    return tomli_w.dumps(tables)


def test_a_version_that_a_submitted_spec_leaves_out_is_written_into_it(plane: Served):
    pushed(plane, *(wheel(version=each) for each in ("1.9", "1.10", "2.0rc1", "1.11")), wheel("default-other"))
    plane.made("/api/packages/default-shout/yank", {"version": "1.11"})

    def stored(spec_toml: str) -> str:
        attempt, token = plane.open_attempt(plane.submit(spec_toml=spec_toml))
        return plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)["spec_toml"]

    open_name = spec_with("default/shout", "sort", "Default/other")
    found = stored(open_name)
    assert found == spec_with("default/shout==1.10", "sort", "Default/other==1.0")
    pushed(plane, wheel(version="1.12"))
    assert "default/shout==1.12" in stored(open_name)
    mixed = parse_spec(tomllib.loads(open_name)), parse_spec(tomllib.loads(found))
    labels = [part_labels(each.environment.params["parts"]) for each in mixed if isinstance(each, RlSpec)]
    assert labels == [["shout", "sort", "other"]] * 2  # the names of metrics do not change
    for as_it_is in (spec_with("default/shout==1.9"), spec_with("default/shout", pins="runs/mine/environment"), SPEC):
        assert stored(as_it_is) == as_it_is


def test_a_spec_whose_package_no_attempt_could_get_is_refused_when_it_is_submitted(plane: Served):
    plane.made("/api/projects", {"name": "p"})
    plane.made("/api/packages", push_body(wheel("default-inside"), project="p"))
    pushed(plane, wheel("default-gone"))
    plane.made("/api/packages/default-gone/yank", {"version": "1.0"})
    for name, project, says in [
        ("default/gone", "default", "every version of it was yanked"), ("default/none", "default", "sees no package"),
        ("default/inside", "default", "the run's project sees no package"), ("default/inside", "p", ""),
    ]:  # fmt: skip
        told = plane.ask("POST", "/api/runs", body={"spec_toml": spec_with(name), "target": "box", "project": project})
        assert (told.status_code, says in told.text) == (422 if says else 201, True), told.text


# --- what is fetched


@ON_SQLITE
def test_verify_checks_bytes_record_and_signature(plane: Served):
    pushed(plane, wheel())
    public = plane.plane.shelf.signer.public
    found = index_of(plane).verify(package_name(NAME), public)
    assert (found.package, found.version, found.files) == ("default/shout", "1.0", 1)
    assert found.provenance["pushed_by"] == {"org": "default", "key": "operator"}
    assert json.dumps(found.row())
    with pytest.raises(SpecError, match="is not signed by the server's key"):
        index_of(plane).verify(package_name(NAME), Signer(b"x" * 32).public)


def test_the_signing_key_stays_and_only_its_user_reads_it(tmp_path: Path):
    first, second = read_signer(tmp_path), read_signer(tmp_path)
    assert first.public == second.public
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / KEY_FILE).write_text("damaged")
    with pytest.raises(SpecError, match="is not the signing key"):
        read_signer(tmp_path)


@ON_SQLITE
def test_the_newest_version_that_is_neither_yanked_nor_a_trial_is_chosen(plane: Served):
    pushed(plane, *(wheel(version=each) for each in ("1.9", "1.10", "2.0rc1", "1.11")))
    plane.made("/api/packages/default-shout/yank", {"version": "1.11"})
    index = index_of(plane)
    assert index.choose(package_name("default/shout")).filename.split("-")[1] == "1.10"
    assert index.choose(package_name("default/shout==2.0rc1")).filename.split("-")[1] == "2.0rc1"
    with pytest.raises(SpecError, match="there is no such version"):
        index.choose(package_name("default/shout==3"))


@ON_SQLITE
def test_a_run_keeps_wheels_and_pins_and_takes_what_its_org_needs_from_the_index_alone(plane: Served, tmp_path: Path):
    parts = wheel("default-parts", "2.0", module="parts")
    pushed(plane, wheel(requires=("default-parts>=2", "pytest", "nowhere; python_version < '3'")), parts)
    keep_packages([NAME], index_of(plane), tmp_path / "kept")
    pins = json.loads((tmp_path / "kept" / PINS).read_text())
    assert [(each["name"], each["version"]) for each in pins["packages"]] == [
        ("default-parts", "2.0"), ("default-shout", "1.0"),
    ]  # fmt: skip
    assert pins["machine"] == {"pytest": pytest.__version__}
    for requires, says in [
        ("default-absent", "is taken from no other place"), ("default-parts>=3", "has no such version"),
        ("nowhere", "which is not installed here"), ("pytest<1", "is installed here"),
        ("pytest @ https://elsewhere/x.whl", "from a place of its own"),
    ]:  # fmt: skip
        version = f"1.{len(says)}"
        pushed(plane, wheel(version=version, requires=(requires,)))
        with pytest.raises(SpecError, match=says):
            keep_packages([f"default/shout=={version}"], index_of(plane), tmp_path / "refused")
        assert not (tmp_path / "refused").exists()


@ON_SQLITE
def test_what_a_run_keeps_is_checked_before_it_is_installed(
    plane: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, content = wheel()
    pushed(plane, (file, content))
    keep_packages([NAME], index_of(plane), kept := tmp_path / "kept")
    installed = install_kept(kept, [NAME])
    assert installed.places == {NAME: "shout_env:Shout"}
    assert (installed.site / "shout_env.py").read_text() == CODE
    plane.made("/api/packages/default-shout/yank", {"version": "1.0"})
    with pytest.raises(SpecError, match="was yanked"):
        keep_packages([NAME], index_of(plane), tmp_path / "new")
    assert install_kept(kept, ["default/shout"]).site == installed.site  # a run that has it goes on
    with pytest.raises(SpecError, match="is not what"):
        install_kept(kept, ["default/shout==2.0"])
    (installed.site / "shout_env.py").write_text("changed = True\n")
    with pytest.raises(RunError, match="was changed"):
        install_kept(kept, [NAME])
    (kept / file).write_bytes(wheel(code="class Shout: tasks = run = 1\n")[1])
    with pytest.raises(RunError, match="is not the wheel that"):
        install_kept(kept, [NAME])
    (kept / PINS).unlink()
    with pytest.raises(RunError, match="the pins of the environment's packages cannot be read"):
        install_kept(kept, [NAME])


@ON_SQLITE
def test_nothing_of_pips_settings_changes_where_packages_come_from(
    plane: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A package of the same name and a higher version lies in a place that pip is told of in every way."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trap = tmp_path / "trap"
    trap.mkdir()
    file, content = wheel(version="9.0", code="trapped = True\nclass Shout: tasks = run = 1\n")
    (trap / file).write_bytes(content)
    (tmp_path / "pip.conf").write_text(f"[global]\nfind-links = {trap}\nno-index = true\n")
    for name, value in {
        "PIP_FIND_LINKS": trap, "PIP_EXTRA_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": tmp_path / "pip.conf",
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    pushed(plane, wheel())
    keep_packages(["default/shout"], index_of(plane), tmp_path / "kept")
    site = install_kept(tmp_path / "kept", ["default/shout"]).site
    assert "trapped" not in (site / "shout_env.py").read_text()


@ON_SQLITE
@pytest.mark.slow
def test_where_there_is_no_pip_uv_installs_what_a_run_keeps(
    plane: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pushed(plane, wheel())
    keep_packages([NAME], index_of(plane), tmp_path / "kept")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="neither pip nor uv is installed here"):
        install_kept(tmp_path / "kept", [NAME])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    site = install_kept(tmp_path / "kept", [NAME]).site
    assert (site / "shout_env.py").read_text() == CODE
    assert install_kept(tmp_path / "kept", [NAME]).site == site


# --- specs


def test_a_package_plays_in_a_sandbox_and_a_spec_that_asks_for_none_is_refused():
    tables = {
        "recipe": "rl", "model": {"preset": "tiny"}, "environment": {"name": NAME},
        "train": {"steps": 1, "lr": 1e-3, "groups_per_step": 2, "group_size": 4},
    }  # fmt: skip
    found = parse_spec(tables).environment
    assert (found.sandbox, found.workers) == ("bwrap", 8)
    for table, says in [
        ({"name": NAME, "sandbox": "off"}, "plays in a sandbox only"),
        ({"name": NAME, "workers": 0}, "needs worker processes"),
        ({"name": "sort", "pins": "somewhere"}, "'sort' is no package"),
    ]:
        with pytest.raises(SpecError, match=says):
            parse_spec({**tables, "environment": table})
    mixed = [{"name": NAME, "sandbox": "off"}, {"name": "sort"}]
    with pytest.raises(SpecError, match="plays in a sandbox only"):
        parse_spec({**tables, "environment": mixed})


@ON_SQLITE
def test_a_fenced_agent_installs_nothing(plane: Served):
    pushed(plane, wheel())
    run = plane.submit()
    attempt, token = plane.open_attempt(run)
    plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)
    path = f"/api/attempts/{attempt}/simple/default-shout/"
    assert plane.ask("GET", path, token).status_code == 200
    plane.now[0] += 10**9  # its lease ran out
    told = plane.ask("GET", path, token)
    assert (told.status_code, told.json()["error"]["code"]) == (409, "fenced")
