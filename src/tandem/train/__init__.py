"""From groups to versions: packing, the trainer."""
