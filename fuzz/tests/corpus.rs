//! The corpus, and some thousands of arbitrary inputs made from a seed, on a stable compiler.

use std::path::Path;

use d2tp_session::Rng;

fn replay(target: &str, f: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{target} has no corpus");
    for file in files {
        eprintln!("{}", file.display());
        f(&std::fs::read(file).unwrap());
    }
}

/// Inputs that differ with the seed only: a failure says which one it was.
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
    replay("frames", d2tp_fuzz::frames);
    arbitrary(1, 20_000, 200, d2tp_fuzz::frames);
}

#[test]
fn datagram() {
    replay("datagram", d2tp_fuzz::datagram);
    arbitrary(2, 1_000, 4000, d2tp_fuzz::datagram);
}

#[test]
fn record() {
    replay("record", d2tp_fuzz::record);
    arbitrary(3, 2_000, 300, d2tp_fuzz::record);
}

#[test]
fn handshake() {
    replay("handshake", d2tp_fuzz::handshake);
    arbitrary(4, 1_500, 300, d2tp_fuzz::handshake);
}

#[test]
fn operations() {
    replay("operations", d2tp_fuzz::operations);
    arbitrary(5, 400, 400, d2tp_fuzz::operations);
}
