"""vLLM as an engine, seen from the process that starts it. What runs inside vLLM is in `vllm_worker/`.

Import `VllmEngine` from engine.py. weight_update.py loads versions, process.py runs vLLM and halts its requests,
token_reader.py reads sampled tokens, install.py and tested_versions.py say which vLLM may be used.
"""
