# What every text of this folder begins with. A job has a directory, ROOT/NAME; what providers write is in its `.job`:
# `rc` is the exit code of its first process, written by a rename.
set -u

no() {  # why a need is not met: "busy" for now, "never" for good
  kind=$1; shift
  printf '%s\t%s\n' "$kind" "$*"
  return 1
}

tidy() {  # DAYS: removes the directories of 20 jobs at most that are over, and did not change for so long; 0: none
  [ "$1" -gt 0 ] || return 0
  find "$root" -mindepth 2 -maxdepth 2 -name .job -mtime "+$1" 2> /dev/null | head -n 20 | while read -r old; do
    name=${old%/.job} && name=${name##*/}
    if [ -e "$old/rc" ] || over "$name"; then rm -rf "${root:?}/$name"; fi
  done
}

read_file() {  # NAME PATH OFFSET LIMIT
  [ -f "$root/$1/$2" ] || return 0
  tail -c "+$(($3 + 1))" -- "$root/$1/$2" | head -c "$4"
}

main() {  # ROOT FUNCTION ARGUMENTS...
  case $1 in '~') root=$HOME ;; '~/'*) root=$HOME/${1#'~/'} ;; *) root=$1 ;; esac
  shift
  "$@"
}
