#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| d2tp_fuzz::record(bytes));
