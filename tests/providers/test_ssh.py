"""The suite over OpenSSH's own server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from places import Place, Sshd, free_port, sshd
from sentences import *  # noqa: F403
from sentences import begun, job, run, seen, until

from tandem.errors import ProviderSilent
from tandem.job_types import Handle, Need
from tandem.protocols import Provider
from tandem.providers.machine import MachineProvider, SshTargetSettings

pytestmark = pytest.mark.skipif(not sshd(), reason="no sshd here: make install-system")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    found = Sshd(tmp_path_factory.mktemp("sshd"))
    yield found
    found.kill()


@pytest.fixture(scope="module")
def place(server: Sshd, tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("jobs")
    settings = SshTargetSettings.model_validate({**server.login, "directory": str(root)})

    def silent() -> Provider:
        return MachineProvider(settings.model_copy(update={"port": free_port()}))

    return Place("ssh", lambda: MachineProvider(settings), root, silent, server.restart)


def test_a_host_key_that_is_not_known_is_refused(server: Sshd, place: Place, tmp_path: Path) -> None:
    (tmp_path / "known").write_text("")
    login = {**server.login, "known_hosts": str(tmp_path / "known"), "directory": str(place.directory)}
    login["host"] = str(login["host"]).replace("127.0.0.1", "localhost")  # no connection to share
    provider = MachineProvider(SshTargetSettings.model_validate(login))
    with pytest.raises(ProviderSilent, match=r"[Hh]ost key"):
        run(provider.find(""))


def test_a_host_that_takes_the_connection_and_says_nothing_is_unknown(place: Place) -> None:
    async def against_silence() -> None:
        held = []
        server = await asyncio.start_server(lambda reader, writer: held.append(writer), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        provider = place.provider()
        assert isinstance(provider, MachineProvider)
        settings = provider.settings.model_copy(update={"port": port, "timeout_s": 2.0})
        (sight,) = await MachineProvider(settings).look([Handle("tandem-x-1")])
        assert sight.state == "unknown"
        server.close()
        for writer in held:
            writer.close()

    run(against_silence())


def test_a_job_outlives_its_server_and_its_code_is_read_afterwards(server: Sshd, place: Place) -> None:
    handle = begun(place, job("sh", "-c", "sleep 1; exit 12"))
    server.kill()
    assert seen(place, handle).state == "unknown"
    import time

    time.sleep(1.2)
    server.start()
    assert until(replace(place, settle_s=30), handle, "ended").code == 12


def test_commands_share_one_connection(server: Sshd, place: Place) -> None:
    def logins() -> int:
        return (server.root / "log").read_text(errors="replace").count("Accepted publickey")

    async def several() -> int:
        provider = place.provider()
        await provider.offers(Need())
        before = logins()
        assert before
        for _ in range(5):
            await provider.look([Handle("tandem-x-1")])
        return logins() - before

    assert run(several()) == 0
