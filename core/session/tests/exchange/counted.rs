//! What the instruction counts of `bench/counts` run, which lies outside the workspace.

#[path = "../../../../bench/counts/src/lib.rs"]
#[allow(dead_code)]
mod counts;

#[test]
fn packets_handshake_and_wake_run_to_their_ends() {
    let (mut pair, flow) = counts::warm();
    counts::send(&mut pair, flow, 100 * counts::PAYLOAD_BYTES);
    for mut pair in [counts::two(12), counts::asleep()] {
        pair.open_path();
        let mut turns = 0;
        while !pair.is_established() {
            pair.turn();
            turns += 1;
            assert!(turns < 10_000, "no keys after 2 s");
        }
    }
}
