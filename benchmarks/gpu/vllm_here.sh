#!/bin/bash
# vllm_here.sh SITE: makes .tandem/vllm/bin/python here, an interpreter that finds the vLLM which was unpacked in SITE.
set -euo pipefail
mkdir -p .tandem/vllm/bin
printf '#!/bin/bash\n. %s/env.sh\nexec python3 "$@"\n' "$1" > .tandem/vllm/bin/python
chmod +x .tandem/vllm/bin/python
