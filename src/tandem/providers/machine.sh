# What one machine does for a provider: starts jobs, looks at them, ends them. Read whole by `sh -s`, after common.sh and
# with a last line that calls one function; a text that was cut on its way therefore does nothing. Needs Linux, flock, setsid
# and GNU grep.
#
#   ROOT/NAME/         the job's directory, in which its command line runs
#     console          what it printed
#     .job/pid         its first process: pid, start time, boot id, pid of its parent. Written once: the job has begun
#     .job/rc          the exit code of its first process. It has ended once no process of it is left
#     .job/held        CPUs, MiB of memory, GPUs that it was given
#     .job/term        SIGTERM was sent
#
# A job begins once: `pid` is written by the first process itself, under a lock that it inherits from the launch. If it dies
# before that, the lock is free and nothing has begun.

alive() {  # JOB: whether its first process lives; sets pid, start, boot, parent
  { read -r pid start boot parent < "$1/pid"; } 2> /dev/null || return 1
  [ "$boot" = "$(cat /proc/sys/kernel/random/boot_id)" ] || return 1
  same_process "$pid" "$start"
}

same_process() {  # PID START: whether this process lives and began then; a pid alone may have been given to another
  started=$2
  stat=$(cat "/proc/$1/stat" 2> /dev/null) || return 1
  set -- ${stat##*) }
  [ "$1" != Z ] && [ "${20}" = "$started" ]
}

members() {  # NAME: the pids of its processes: those with its mark in their environment, their sessions and descendants
  seeds=$(grep -lzxF "TANDEM_JOB=$root/$1" /proc/[0-9]*/environ 2> /dev/null | sed 's|^/proc/\([0-9]*\)/.*|\1|')
  [ -n "$seeds" ] || return 0
  cat /proc/[0-9]*/stat 2> /dev/null | awk -v seeds="$(echo $seeds)" '
    { pid = $1; sub(/^.*\) /, ""); if ($1 != "Z") { parent[pid] = $2; session[pid] = $4 } }
    END {
      count = split(seeds, seed, " ")
      for (i = 1; i <= count; i++) job[seed[i]]
      do {
        more = 0
        for (p in parent) if (!(p in job) && (parent[p] in job || session[p] in job)) { job[p]; more = 1 }
      } while (more)
      for (p in job) if (p in parent) print p
    }'
}

marked() {  # NAME: whether a process has its mark. All marks are read once, when the first is asked for
  [ -n "${marks-}" ] || marks=$(echo .; cat /proc/[0-9]*/environ 2> /dev/null | tr '\0' '\n' | grep -F "TANDEM_JOB=$root/" | sort -u)
  case "$marks
" in *"
TANDEM_JOB=$root/$1
"*) ;; *) false ;; esac
}

gpus() { nvidia-smi --query-gpu=index,memory.total,memory.used,name --format=csv,noheader,nounits 2> /dev/null; }

room() {  # CPUS MIB GPUS GPU_MIB GPU_NAME: prints the GPUs to use, or why not
  held_cpus=0 held_mib=0 held_gpus=,
  for file in "$root"/*/.job/held; do
    job=${file%/held}
    name=${job%/.job}
    if ! alive "$job" && ! marked "${name##*/}"; then continue; fi
    read -r c m g < "$file"
    held_cpus=$((held_cpus + c)) held_mib=$((held_mib + m)) held_gpus=$held_gpus$g,
  done
  all_cpus=$(nproc) all_mib=$(awk '/^MemTotal:/ { print int($2 / 1024) }' /proc/meminfo)
  [ "$1" -le "$all_cpus" ] || { no never "it has $all_cpus CPUs"; return; }
  [ "$2" -le "$all_mib" ] || { no never "it has $all_mib MiB of memory"; return; }
  [ "$1" -eq 0 ] || [ $((held_cpus + $1)) -le "$all_cpus" ] || { no busy "jobs hold $held_cpus of $all_cpus CPUs"; return; }
  [ "$2" -eq 0 ] || [ $((held_mib + $2)) -le "$all_mib" ] || { no busy "jobs hold $held_mib of $all_mib MiB"; return; }
  [ "$3" -gt 0 ] || { printf 'ok\t-\n'; return; }
  gpus | awk -F ', ' -v want="$3" -v mib="$4" -v name="$5" -v held="$held_gpus" '
    index(tolower($4), tolower(name)) && $2 >= mib {
      fit++
      if (index(held, "," $1 ",")) jobs++
      else if ($3 * 10 > $2) others++     # an idle GPU uses some hundred MiB
      else if (got < want) list = list (got++ ? "," : "") $1
    }
    END {
      if (got + 0 == want) print "ok\t" list
      else if (fit + 0 < want) print "never\tit has " fit + 0 " such GPUs"
      else print "busy\tof " fit " such GPUs, jobs hold " jobs + 0 ", other programs use " others + 0
      exit got + 0 != want
    }'
}

probe() {  # NEED...: what there is, one line each, then whether there is room
  printf 'cpus\t%s\n' "$(nproc)"
  printf 'mib\t%s\n' "$(awk '/^MemTotal:/ { print int($2 / 1024) }' /proc/meminfo)"
  gpus | sed 's/^/gpu	/'
  for tool in flock setsid grep awk; do
    command -v "$tool" > /dev/null || { no never "$tool is not installed there"; return 0; }
  done
  room "$@" || :
}

# The outer shell of a job outlives SIGTERM, to write the exit code; a trap, unlike an ignored signal, is not inherited.
keep='trap : TERM INT HUP
  begin=$1; shift
  sh -c "$begin" "$0" "$@"
  echo $? > "$0/rc.part"; mv "$0/rc.part" "$0/rc"'

# The inner one writes down what it is, frees the lock, and becomes the command line.
begin='start() { set -- ${1##*) }; echo "${20}"; }
  echo $$ "$(start "$(cat /proc/$$/stat)")" "$(cat /proc/sys/kernel/random/boot_id)" $PPID > "$0/pid.part"
  mv "$0/pid.part" "$0/pid" || exit 70
  flock -u 9; exec 9>&-
  exec "$@"'

over() { ! alive "$root/$1/.job" && [ -z "$(members "$1")" ]; }  # NAME: whether none of its processes lives

launch() {  # DAYS NAME CPUS MIB GPUS GPU_MIB GPU_NAME COMMAND...: begins it, or finds that it has begun
  days=$1; shift
  name=$1 job=$root/$1/.job mask=$(umask)
  umask 077
  mkdir -p "$root" && exec 9>> "$root/.lock" && flock 9 || exit 70
  if [ ! -e "$job/pid" ]; then
    (tidy "$days")
    found=$(room "$2" "$3" "$4" "$5" "$6") || { printf '%s\n' "$found"; exit 69; }
    mkdir -p "$job" || exit 70
    list=${found#*	}
    printf '%s %s %s\n' "$2" "$3" "$list" > "$job/held"
    shift 6
    [ "$list" = - ] || export CUDA_VISIBLE_DEVICES="$list" CUDA_DEVICE_ORDER=PCI_BUS_ID
    export TANDEM_JOB="$root/$name"
    umask "$mask"
    cd "$root/$name" || exit 70
    setsid sh -c "$keep" "$job" "$begin" "$@" < /dev/null > console 2>&1 &
    exec 9>&-
    exec 8>> "$root/.lock" && flock 8     # free once the job has begun, or died before it
    [ -e "$job/pid" ] || exit 70
  fi
  printf 'begun\t%s\n' "$name"
}

look() {  # NAMES...: a line for each: name, state, exit code, why
  for name; do
    job=$root/$name/.job
    if [ ! -e "$job/pid" ]; then printf '%s\tgone\t\tit was never started here\n' "$name"
    elif alive "$job"; then printf '%s\trunning\t\t\n' "$name"
    elif marked "$name"; then printf '%s\trunning\t\tits first process is gone, others go on\n' "$name"
    elif [ -e "$job/rc" ]; then printf '%s\tended\t%s\t\n' "$name" "$(cat "$job/rc")"
    elif [ "$boot" != "$(cat /proc/sys/kernel/random/boot_id)" ]; then
      printf '%s\tgone\t\tthe machine was restarted\n' "$name"
    else printf '%s\tgone\t\tits processes were killed\n' "$name"
    fi
  done
}

find_jobs() {  # PREFIX
  for file in "$root/$1"*/.job/pid; do
    [ -e "$file" ] || continue
    name=${file%/.job/pid}
    printf '%s\n' "${name##*/}"
  done
}

term() {  # NAME: SIGTERM to its first process, once; prints whether any of its processes lives
  job=$root/$1/.job
  if alive "$job" && [ ! -e "$job/term" ]; then : > "$job/term"; kill -TERM "$pid" 2> /dev/null; fi
  lives "$1"
}

lives() {  # NAME: first: its first process. rest: others. no: none
  if alive "$root/$1/.job"; then echo first; elif [ -n "$(members "$1")" ]; then echo rest; else echo no; fi
}

end_now() {  # NAME: SIGKILL to all its processes; at first not to the shell that writes the exit code
  [ -e "$root/$1/.job/pid" ] || return 0
  alive "$root/$1/.job"
  for round in 1 2 3 4 5 6 7 8 9 10; do
    left=$(members "$1")
    [ -n "$left" ] || return 0
    for each in $left; do
      if [ "$each" != "$parent" ] || [ $round -gt 5 ]; then kill -KILL "$each" 2> /dev/null; fi
    done
    sleep 0.1
  done
  [ -z "$(members "$1")" ] || { echo "SIGKILL does not end: $left"; exit 70; }
}
