#![no_main]
#[path = "../src/feed.rs"]
mod feed;
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| feed::feed(bytes));
