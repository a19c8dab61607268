"""A second reader of D2TP, written from docs/protocol.md alone. It never writes a packet."""
