//! The fuzz targets of `fuzz/` over their corpus, and over some thousands of arbitrary inputs made
//! from a seed: on any compiler, without a fuzzer.

#[path = "../../../../fuzz/src/lib.rs"]
mod fuzz;

use std::path::Path;

use d2tp_session::Rng;

fn replay(target: &str, f: fn(&[u8])) {
    for (name, bytes) in inputs(target) {
        // Shown when it fails: which file, which input.
        eprintln!("{target}/{name}");
        f(&bytes);
    }
}

/// A target's corpus, by name.
#[allow(clippy::disallowed_methods, reason = "the corpus lies in files")]
fn inputs(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
    let mut files: Vec<_> = entries
        .map(|e| {
            let name = e.file_name().to_string_lossy().into_owned();
            (name, std::fs::read(e.path()).unwrap())
        })
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{target} has no corpus");
    files
}

/// Inputs that depend only on the seed, which a failure reports.
fn arbitrary(seed: u8, count: usize, len_max: u64, f: fn(&[u8])) {
    let mut rng = Rng::new([seed; 32]);
    for n in 0..count {
        let mut bytes = vec![0; (rng.u64() % len_max) as usize];
        rng.fill(&mut bytes);
        eprintln!("seed {seed}, input {n}");
        f(&bytes);
    }
}

#[test]
fn frames() {
    replay("frames", fuzz::frames);
    arbitrary(1, 20_000, 200, fuzz::frames);
}

#[test]
fn datagram() {
    replay("datagram", fuzz::datagram);
    arbitrary(2, 1_000, 4000, fuzz::datagram);
}

#[test]
fn record() {
    replay("record", fuzz::record);
    // A corpus of another format would fuzz its refusal only.
    let valid = inputs("record").into_iter().filter(|(name, bytes)| {
        let reads = d2tp_session::SessionRecord::decode(bytes).is_ok();
        assert_eq!(reads, !name.starts_with("bad-"), "{name}");
        reads
    });
    assert!(valid.count() >= 5);
    arbitrary(3, 2_000, 300, fuzz::record);
}

#[test]
fn handshake() {
    replay("handshake", fuzz::handshake);
    arbitrary(4, 1_500, 300, fuzz::handshake);
}

/// Mostly what moves a transfer on, so that the rest meets one in every state.
fn steered(bytes: &[u8]) {
    const USUAL: [u8; 16] = [0, 1, 3, 4, 5, 5, 6, 9, 9, 11, 11, 12, 15, 15, 10, 16];
    let mut bytes = bytes.to_vec();
    for pair in bytes.chunks_exact_mut(2) {
        if pair[0] >= 64 {
            pair[0] = USUAL[usize::from(pair[0] % 16)];
        }
    }
    fuzz::operations(&bytes);
}

/// The fewest pairs of actions that still fail, found by leaving some out. None if it does not fail.
fn shrunk(bytes: &[u8], fails: impl Fn(&[u8]) -> bool) -> Option<Vec<u8>> {
    let mut least = bytes.to_vec();
    if !fails(&least) {
        return None;
    }
    let mut chunk = (least.len() / 4).max(1) * 2;
    while chunk >= 2 {
        let mut at = 0;
        while at < least.len() {
            let mut fewer = least.clone();
            fewer.drain(at..(at + chunk).min(fewer.len()));
            if fails(&fewer) {
                least = fewer;
            } else {
                at += chunk;
            }
        }
        chunk = chunk / 4 * 2;
    }
    Some(least)
}

/// Runs actions; if they fail, the fewest of them that do are run once more, to be listed.
fn told(bytes: &[u8]) {
    let quietly = |bytes: &[u8]| {
        let bytes = bytes.to_vec();
        std::panic::catch_unwind(move || steered(&bytes)).is_err()
    };
    if let Some(least) = shrunk(bytes, quietly) {
        eprintln!("the fewest actions that fail: {least:?}");
        steered(&least);
    }
}

#[test]
fn operations() {
    replay("operations", fuzz::operations);
    arbitrary(5, 400, 400, told);
}

#[test]
fn a_failure_shrinks_to_the_actions_it_needs() {
    let bytes: Vec<u8> = (0..200).collect();
    let fails = |bytes: &[u8]| {
        let pairs: Vec<&[u8]> = bytes.chunks_exact(2).collect();
        pairs.contains(&&[20, 21][..]) && pairs.contains(&&[150, 151][..])
    };
    assert_eq!(shrunk(&bytes, fails), Some(vec![20, 21, 150, 151]));
    assert_eq!(shrunk(&bytes[..100], fails), None);
}
