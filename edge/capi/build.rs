//! Link options of the shared library: its name, and that it is never unloaded, because its thread
//! cannot be stopped.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libd2tp.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
