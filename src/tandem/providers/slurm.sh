# What a login node of Slurm does for a provider. Read whole by `sh -s`, after common.sh and with a last line that calls one
# function. Needs flock and Slurm's own commands.
#
#   ROOT/NAME/         the job's directory, on a disk that the nodes share: its command line runs in it
#     console          what it printed
#     .job/id          Slurm's number of it: it was asked for
#     .job/begun/      made by its first execution, with its number. Slurm may start a job again (a slurmctld that was killed
#                      does, whatever --no-requeue says): a second execution finds this and ends
#     .job/rc          its exit code, once no process of it is left: the truth, also after Slurm has forgotten the job
#     .job/term        SIGTERM was sent

mine() {  # [OPTION]: this user's jobs, a line each: state, reason, name
  squeue --noheader --states=all --user="$(id -un)" "$@" --format="%T	%r	%j"
}

# What Slurm runs, in the job's directory. COMMAND is put behind it. The shell waits for the command line, since Slurm sends
# SIGTERM to the shell alone.
batch='#!/bin/sh
mkdir .job/begun || { echo "tandem: this job has begun before; it does not begin again" >&2; exit 75; }
echo "$SLURM_JOB_ID" > .job/begun/id
export TANDEM_JOB="$PWD"
asked= again= child= code=
trap "asked=1 again=1; ask" TERM
ask() {  # srun forwards no SIGTERM: Slurm sends it to what it started
  [ -z "$child" ] || if [ "$first" = srun ]; then scancel --signal=TERM "$SLURM_JOB_ID"; else kill -TERM "$child"; fi
}
trap "again=1; sweep" USR1
sweep() {  # all that carries the mark, in whatever session: not every cluster tracks those. This shell does not carry it
  for round in 1 2 3; do
    for file in $(grep -slzxF "TANDEM_JOB=$PWD" /proc/[0-9]*/environ); do
      file=${file%/environ}
      kill -KILL "${file#/proc/}" 2> /dev/null
    done
  done
}
marked() { TANDEM_JOB= grep -qszxF "TANDEM_JOB=$PWD" /proc/[0-9]*/environ; }
begin() { first=$1; "$@" & child=$!; }
finish() {
  [ -z "$asked" ] || ask
  while again=; wait "$child"; got=$?; [ -n "$code" ] && [ $got -eq 127 ] || code=$got; [ -n "$again" ]; do
    :  # a signal came: it ends `wait` with a code of its own
  done
  while marked; do sleep 1; done  # others go on: an agent whose guard was killed
  echo $code > .job/rc.part && mv .job/rc.part .job/rc
}'

launch() {  # DAYS NAME COMMAND FLAGS...: asks Slurm for it, unless it was asked for
  days=$1 name=$2 job=$root/$2/.job command=$3 mask=$(umask)
  shift 3
  umask 077
  mkdir -p "$root" && exec 9>> "$root/.lock" && flock 9 || exit 70
  if [ ! -e "$job/id" ] && [ ! -e "$job/begun" ]; then
    listed=$(mine --name="$name") || exit 70
    if [ -z "$listed" ]; then
      (tidy "$days")
      mkdir -p "$job" || exit 70
      printf '%s\nbegin %s\nfinish\n' "$batch" "$command" > "$job/batch" || exit 70
      umask "$mask"
      answer=$(sbatch --parsable --job-name="$name" --chdir="$root/$name" --output="$root/$name/console" \
        --open-mode=append --no-requeue --export=ALL "$@" "$job/batch" 2>&1 9>&-) || {
        case $answer in  # without an answer it may have been taken all the same
          *ontact*|*'timed out'*|*'Zero Bytes'*|*'ommunication'*|*uthentication*) printf '%s\n' "$answer" >&2; exit 70 ;;
        esac
        rm -rf "${root:?}/$name"
        no never "$(printf %s "$answer" | tr '\n\t' '  ')" || exit 69
      }
      echo "${answer##*
}" > "$job/id"
    fi
  fi
  printf 'begun\t%s\n' "$name"
}

state_of() {  # LISTED NAME: Slurm's word for it, and why. Of two jobs of one name, the one that is not over counts
  printf '%s\n' "$1" | awk -F '\t' -v name="$2" '
    $3 == name && (found == "" || found ~ /^[A-Z_]*(FAIL|CANCEL|COMPLETED|TIMEOUT|OUT_OF)/) { found = $1 "\t" $2 }
    END { print found }'
}

look() {  # NAMES...: a line for each: name, state, exit code, why
  listed=$(mine) || exit 70
  for name; do
    job=$root/$name/.job
    word=$(state_of "$listed" "$name")
    told="Slurm: $(printf %s "$word" | tr '\t' ' ')"
    if [ -e "$job/rc" ]; then printf '%s\tended\t%s\t\n' "$name" "$(cat "$job/rc")"; continue; fi
    case ${word%%	*} in
      COMPLETED) state=unknown why='it has ended; its exit code is not on this disk yet' ;;
      PENDING|CONFIGURING|REQUEUE*|RESV_DEL_HOLD|SPECIAL_EXIT) state=waiting why=$told ;;
      BOOT_FAIL|CANCELLED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|REVOKED|TIMEOUT) state=gone why=$told ;;
      '') state=gone
        if [ -e "$job/begun" ]; then why='it left no exit code, and Slurm has forgotten it'
        elif [ -e "$job/id" ]; then why='it never began, and Slurm has forgotten it'
        else why='it was never started here'; fi ;;
      *) state=running why=$told ;;
    esac
    printf '%s\t%s\t\t%s\n' "$name" "$state" "$why"
  done
}

find_jobs() {  # PREFIX: those that left a directory, and those that only Slurm knows: their launch was cut
  listed=$(mine) || exit 70
  {
    for file in "$root/$1"*/.job/id "$root/$1"*/.job/begun; do
      [ -e "$file" ] || continue
      name=${file%/.job/*}
      printf '%s\n' "${name##*/}"
    done
    printf '%s\n' "$listed" | awk -F '\t' -v prefix="$1" '$3 != "" && index($3, prefix) == 1 { print $3 }'
  } | sort -u
}

over() {  # NAME
  listed=$(mine --name="$1") && case $(state_of "$listed" "$1") in ''|*FAIL*|CANCEL*|COMPLETED*|TIMEOUT*|OUT_OF*) ;; *) false ;; esac
}

lives() {  # NAME: first, if Slurm has it; else no
  listed=$(mine --name="$1" --states=PENDING,CONFIGURING,RUNNING,SUSPENDED,COMPLETING) || exit 70
  if [ -n "$listed" ]; then echo first; else echo no; fi
}

cancel() { scancel --quiet --user="$(id -un)" "$@"; }  # --quiet: a job that is over is no error

term() {  # NAME: SIGTERM to its first process, once; one that waits is taken out of the queue
  cancel --name="$1" --state=PENDING
  if [ -e "$root/$1/.job/begun" ] && [ ! -e "$root/$1/.job/term" ]; then
    : > "$root/$1/.job/term"
    cancel --name="$1" --signal=TERM --batch
  fi
  lives "$1"
}

end_now() {  # NAME: SIGKILL to all its processes; at first not to the shell that writes the exit code
  cancel --name="$1" --signal=USR1 --batch
  for round in 1 2 3 4 5 6 7 8 9 10; do
    [ "$(lives "$1")" != no ] || return 0
    sleep 0.2
  done
  cancel --name="$1" --signal=KILL --full
  cancel --name="$1"
}

partitions() {  # what there is: partition, hosts, their state, CPUs, MiB and GPUs of each
  sinfo --noheader --exact --format='%R	%D	%T	%c	%m	%G' || exit 70
}
