//! The library for LD_PRELOAD, in C: other people's processes get nothing of another language's runtime.

use std::path::PathBuf;

const SOURCES: [&str; 4] = [
    "src/preload.c",
    "src/exec.c",
    "src/replace.c",
    "src/resolver.c",
];

fn main() {
    for source in SOURCES.into_iter().chain(["src/preload.h"]) {
        println!("cargo:rerun-if-changed={source}");
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo says where"));
    let library = out.join("preload.so");
    let mut compiler = cc::Build::new().opt_level(2).get_compiler().to_command();
    let compiled = compiler
        .args([
            "-shared",
            "-fPIC",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
        ])
        .args(["-Wl,-soname,cedos-preload.so", "-Wl,-z,now,-z,relro"])
        .arg("-o")
        .arg(&library)
        .args(SOURCES)
        .args(["-ldl", "-pthread"])
        .status()
        .expect("a C compiler");
    assert!(compiled.success(), "{SOURCES:?} do not compile");
}
