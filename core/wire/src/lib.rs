//! D2TP on the wire: bytes to packets and frames, and back.
