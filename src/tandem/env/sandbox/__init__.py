"""The sandbox of an environment: outside.py makes the bubblewrap command that its fork server runs in; inside.py gives
each worker namespaces of its own, and takes system calls away.
"""
