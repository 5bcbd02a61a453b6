"""What the trainer process prints: kept over its starts, and not for ever."""

from __future__ import annotations

import sys
from pathlib import Path

from tandem.online import trainer_supervisor
from tandem.online.trainer_supervisor import TrainerProcess

SAYS = (sys.executable, "-c", "import sys; print('words'); sys.exit(3)")


def test_a_log_is_gone_on_with_and_a_large_one_is_begun_again(tmp_path: Path):
    log = tmp_path / "trainer.log"
    for _ in range(2):
        ended(log)
    assert log.read_text() == "words\nwords\n"
    log.write_bytes(b"x" * (trainer_supervisor.LOG_BYTES + 1))
    ended(log)
    assert log.read_text() == "words\n"
    assert (tmp_path / "trainer.log.1").stat().st_size == trainer_supervisor.LOG_BYTES + 1


def ended(log: Path) -> None:
    process = TrainerProcess(SAYS, log, {})
    process.stop(30)
    process.socket.close()
    assert process.describe_end() == "exit code 3; words"
