//! The test vectors of `docs/vectors` for integers and frames, encoded and decoded.

mod described;

use d2tp_wire::*;
use described::described;
use serde_json::Value;

fn load(text: &str) -> Value {
    serde_json::from_str(text).expect("vector files are JSON")
}

fn bytes(v: &Value) -> Vec<u8> {
    hex::decode(v.as_str().expect("a string of hex")).expect("hex")
}

#[test]
fn integers_are_as_the_vectors_say() {
    // R-WIRE-3
    let vectors = load(include_str!("../../../docs/vectors/varints.json"));
    for vector in vectors.as_array().unwrap() {
        let (value, hex) = (vector["value"].as_u64().unwrap(), bytes(&vector["hex"]));
        let mut r = WireReader::new(&hex);
        assert_eq!(r.varint(), Ok(value), "{vector}");
        assert!(r.is_empty(), "{vector}");
        let mut out = [0; 8];
        let mut w = WireWriter::new(&mut out);
        w.varint(value);
        let n = w.written();
        assert_eq!(
            out[..n] == hex,
            vector["shortest"].as_bool().unwrap(),
            "{vector}"
        );
    }
}

#[test]
fn frames_are_as_the_vectors_say() {
    let vectors = load(include_str!("../../../docs/vectors/frames.json"));
    for vector in vectors["frames"].as_array().unwrap() {
        let hex = bytes(&vector["hex"]);
        let mut frames = FrameIter::new(&hex);
        let frame = frames.next().expect("a frame").expect("that decodes");
        assert!(frames.next().is_none(), "{vector}");
        let (name, fields) = described(&frame);
        assert_eq!(
            (name, &fields),
            (vector["name"].as_str().unwrap(), &vector["fields"])
        );
        let mut out = vec![0; 2048];
        let mut w = WireWriter::new(&mut out);
        frame.encode(&mut w);
        let n = w.written();
        assert_eq!(hex::encode(&out[..n]), hex::encode(&hex), "{name} written");
    }
}

#[test]
fn what_is_no_frame_is_refused() {
    // R-WIRE-2
    let vectors = load(include_str!("../../../docs/vectors/frames.json"));
    for vector in vectors["malformed"].as_array().unwrap() {
        let hex = bytes(&vector["hex"]);
        assert!(
            FrameIter::new(&hex).any(|f| f.is_err()),
            "{} was taken for frames",
            vector["why"]
        );
    }
}
