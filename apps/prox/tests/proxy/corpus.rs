//! The fuzz target `request` over its corpus, on any compiler.

#[path = "../../../../fuzz/src/request.rs"]
mod fuzz;

#[test]
fn the_corpus_of_requests_is_refused_or_read_in_one_way() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/request");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("the corpus is in the repository") {
        let path = entry.expect("readable").path();
        eprintln!("{}", path.display());
        let whole = std::fs::read(path).expect("readable");
        for cut in 0..=whole.len() {
            fuzz::request(&whole[..cut]);
        }
        count += 1;
    }
    assert!(count >= 10, "{count} requests");
}
