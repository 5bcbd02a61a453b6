"""The online learning server over HTTP: training requests, versions, rollback, keys. The learning is in `online/`."""
