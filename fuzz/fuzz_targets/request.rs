#![no_main]
#[path = "../src/request.rs"]
mod request;
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| request::request(bytes));
