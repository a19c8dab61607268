//! Throughput beside other transports.
fn main() {}
