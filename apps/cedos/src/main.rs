//! The `cedos` command.
fn main() {}
