"""Runs for an assistant, over the Model Context Protocol: `tandem mcp` (layer above recipes/).

reading.py: what it may read, and bounded answers. spending.py: what needs a person's yes. server.py: the tools.
Import `mcp_server`.
"""

from tandem.assistant.server import mcp_server

__all__ = ["mcp_server"]
