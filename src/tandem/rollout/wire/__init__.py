"""The native wire format of groups: schema, validation, codec."""
