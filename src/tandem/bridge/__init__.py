"""Bridges (layer 3): carry a version of the weights from the trainer to its engines, both ends side by side.

`collective/`, `files/` and `shared/` hold one transport each, `common/` what they share, `inproc.py` and `null.py` the
bridges that move no bytes. `build/` makes the trainer's end; `vllm_worker/weight_sources.py` makes an engine's end
from a link. spec/bridges.py says what each bridge needs.
"""
