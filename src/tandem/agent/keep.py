"""Run a program, and write down who it is and how it ended: `python keep.py DIRECTORY LOCK_FD SECONDS PROGRAM WORD...`.

It lives on when the agent that started it is killed. The agent's lock is inherited until the program's identity is on
the disk: so an agent that holds the lock knows for certain whether a program was started. After SECONDS it kills the
program: the run has cost what it may. Only the standard library is imported, so it starts in 30 ms.
"""

import json
import os
import signal
import subprocess
import sys


def identity(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return f"{pid}:{stat.read().rpartition(')')[2].split()[19]}"


def write(directory: str, name: str, text: str) -> None:
    with open(f"{directory}/.{name}.tmp", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{directory}/.{name}.tmp", f"{directory}/{name}")


def main(directory: str, lock: str, most_s: str, *command: str) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, a handler is not inherited
    program = subprocess.Popen(command)
    write(directory, "trainer.json", json.dumps({"program": identity(program.pid), "keeper": identity(os.getpid())}))
    os.close(int(lock))
    try:
        code = program.wait(None if most_s == "inf" else max(0.0, float(most_s)))
    except subprocess.TimeoutExpired:
        program.kill()
        code = program.wait()
    write(directory, "trainer.code", str(code if code >= 0 else 128 - code))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
