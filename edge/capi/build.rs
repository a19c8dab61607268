//! The shared library's name, and that it stays loaded: its thread cannot be taken back.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libd2tp.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
