"""Tensor functions (layer 2) that models, engines, bridges and the trainer share: digests, logprobs, masks, copies.

They know no model and no engine. *_triton.py holds the GPU kernels of the file of the same name.
"""
