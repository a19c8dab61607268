//! The build script. The library's thread cannot be stopped, so the binding stays loaded, even when
//! one of Node's workers ends.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
