//! Builds the library for LD_PRELOAD, which is in C so that programs get no runtime of another
//! language.

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
    let mut compiler = cc::Build::new()
        .target(&programs_target())
        .opt_level(2)
        .get_compiler()
        .to_command();
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

/// The target of the programs that load the library. A static `cedos` is built for musl, and runs programs of glibc:
/// those cannot load a library that names musl's libc.so, while musl takes `libc.so.6` for itself.
fn programs_target() -> String {
    let own = std::env::var("TARGET").expect("cargo says for what");
    own.replace("-linux-musl", "-linux-gnu")
}
