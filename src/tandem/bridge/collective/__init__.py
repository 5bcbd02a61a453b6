"""The bridges `broadcast` and `adapter_broadcast`: buckets of bytes over a process group or shared buffers.

sender.py (trainer) and receiver.py (engine) are the two ends; the table in receiver.py gives their order of messages.
Import `BroadcastBridge` and `AdapterBroadcastBridge` (build) and `GroupSource` (weight_sources) from here.
"""
