//! The library for LD_PRELOAD, in C: other people's processes get nothing of another language's runtime.

use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=src/preload.c");
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
        .arg("src/preload.c")
        .args(["-ldl"])
        .status()
        .expect("a C compiler");
    assert!(compiled.success(), "src/preload.c does not compile");
}
