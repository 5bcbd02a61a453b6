"""From tasks to groups: recorder, producers, store."""
