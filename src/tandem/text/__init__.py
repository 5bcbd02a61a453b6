"""Turn chats into token ids, each turn once (layer 3): tokenizer, chat template, tool calls and thoughts in streams.

Import `Renderer` from renderer.py.
"""
