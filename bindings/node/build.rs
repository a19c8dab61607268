//! The library's thread cannot be taken back: the binding stays loaded, also when a worker of Node's ends.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
