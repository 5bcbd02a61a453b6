"""The rollout service over HTTP: native routes, Atropos routes, Prometheus metrics."""
