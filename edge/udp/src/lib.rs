//! UDP sockets, one per link, in batches (GSO, GRO, ECN).
