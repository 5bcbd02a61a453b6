"""HTTP services (layer 7): a folder each, over what `build/` hands in.

http/ is what they share, openai/ the API that several of them offer; gateway.py records the conversations of agents;
terminal_chat.py is `tandem chat`.
"""
