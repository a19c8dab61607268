//! The number of instructions that a packet takes: sealed, sent, received, opened, acknowledged.
//!
//! `cargo bench` in this folder prints them, for ten thousand packets together, for one handshake, and for one session
//! that comes back by ticket.

use std::hint::black_box;

use d2tp_counts::{EndpointPair, PACKETS, PAYLOAD_BYTES, asleep, send, two, warm};
use d2tp_session::FlowId;
use gungraun::{library_benchmark, library_benchmark_group, main};

#[library_benchmark]
#[bench::ten_thousand(setup = warm)]
fn packets_sent_and_received((mut two, flow): (EndpointPair, FlowId)) -> EndpointPair {
    send(&mut two, flow, PACKETS * PAYLOAD_BYTES);
    black_box(two)
}

#[library_benchmark]
#[bench::one(args = (12), setup = two)]
fn handshake_of_both_ends(mut two: EndpointPair) -> EndpointPair {
    two.open_path();
    while !two.is_established() {
        two.turn();
    }
    black_box(two)
}

#[library_benchmark]
#[bench::one(setup = asleep)]
fn wake_of_both_ends(mut two: EndpointPair) -> EndpointPair {
    two.open_path();
    while !two.is_established() {
        two.turn();
    }
    black_box(two)
}

library_benchmark_group!(
    name = of_packets,
    benchmarks = [packets_sent_and_received, handshake_of_both_ends, wake_of_both_ends]
);
main!(library_benchmark_groups = of_packets);
