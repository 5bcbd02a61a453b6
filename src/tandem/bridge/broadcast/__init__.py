"""broadcast: full weights in a few large flat buckets, over NCCL between GPUs and gloo between CPUs."""
