"""Runs for an assistant, over the Model Context Protocol: `tandem mcp`, and /mcp of a control server. Above recipes/.

server.py: the tools. desk.py: where they find runs. reading.py: bounded answers. spending.py: what needs a person's
yes. door.py: the tools over HTTP. Import `server.mcp_server` and `door.AssistantDoor`; the door imports the `mcp`
package only when it is used.
"""
