"""HTTP services (layer 7), one folder each. They use the parts that `build/` hands in.

http/ has what all services share, openai/ the API that several of them offer. gateway.py records the conversations of
agents; terminal_chat.py is `tandem chat`.
"""
