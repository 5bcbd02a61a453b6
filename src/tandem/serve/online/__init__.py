"""The online learning server over HTTP: teaching, versions, rollback, keys."""
