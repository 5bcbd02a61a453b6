"""Chat to token ids, exactly once (layer 3): tokenizer, chat template, tool calls and thinking in streams.

Import `Renderer` from renderer.py.
"""
