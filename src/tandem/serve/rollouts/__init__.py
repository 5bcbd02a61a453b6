"""The rollout service over HTTP: native routes, Atropos routes, Prometheus metrics. The queue is `rollout/queue/`."""
