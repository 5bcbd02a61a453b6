"""The bridges `disk` and `restart` (checkpoints) and `adapter` (LoRA files): a version travels as files.

writer.py is the trainer's end, reader.py the engine's. `build/` makes the bridges of checkpoint.py and adapter.py.
"""
