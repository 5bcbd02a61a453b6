"""One command trains on two ranks, and gives the bytes of one."""

from __future__ import annotations

from run_commands import ranks, train, write_spec

import tandem


def test_two_ranks_of_one_command_give_the_bytes_of_one(tmp_path):
    spec = write_spec(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    for run, count in ((one, 1), (two, 2)):
        done = train(spec, run, *ranks(count))
        assert done.returncode == 0, done.stderr[-2000:]
    assert tandem.digest_run(two) == tandem.digest_run(one)
    assert not (one / "ranks").exists()
    assert (two / "ranks" / "1.txt").read_text() == ""
