# What SkyPilot runs on a machine, after common.sh and machine.sh. The job comes through a pipe, so it is in no file: one
# line, in base64 between two colons, so that what was cut on its way is never taken for a job, alone or with the next one.
# When this ends SkyPilot counts the machine as idle, and removes it some minutes later. On Slurm SkyPilot 0.14 takes that
# order and does not carry it out, so the allocation is given back here.

wait_for_job() {  # NAME SECONDS IDLE_SECONDS: until it is over, or SECONDS after it has begun; 0: as long as it takes
  umask 077
  mkdir -p "$root" && cd "$root" || exit 70
  late=$(($(date +%s) + 1800))
  until [ -e "$1/.job/pid" ] || [ "$(date +%s)" -ge "$late" ]; do
    [ -p ".$1.in" ] || mkfifo ".$1.in" || exit 70
    text=$(timeout 1800 grep -am 1 '^:.*:$' ".$1.in") && printf %s "$text" | tr -d : | base64 -d | sh
  done
  rm -f ".$1.in" ".$1.lock"
  late=$(($(date +%s) + $2))
  until over "$1" || { [ "$2" -gt 0 ] && [ "$(date +%s)" -ge "$late" ]; }; do sleep 2; done
  [ -z "${SLURM_JOB_ID:-}" ] || { sleep "$3"; scancel "$SLURM_JOB_ID"; }
}
