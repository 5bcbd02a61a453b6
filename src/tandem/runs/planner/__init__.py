"""`tandem plan`: memory, time and cost of a run, from its spec and the config of its model. Import plan.py."""
