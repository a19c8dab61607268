//! D2TP itself, sans-IO: sessions, paths, flows, recovery, congestion control.
