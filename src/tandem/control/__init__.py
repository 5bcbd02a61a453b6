"""The control plane: runs on other machines, as rows of a database.

tables.py: what is stored. store.py: the database, written by one thread. migrations/: how a database of an earlier
release becomes one of this release. transitions.py: every change that a caller or an agent may ask for. decide.py: what
to do next for a run, as a pure function. reconcile.py: the loop that asks the providers, decides, and does it.
"""
