//! The machine, shared among tests: those that measure it go beside each other, and one that fills
//! it goes alone.
//!
//! A lock on a file beside the test programs, so that it holds between threads of one program and
//! between programs.

use std::fs::File;

use crate::namespace::is_inside;

/// A share of the machine, for as long as this is held.
#[must_use]
pub struct MachineShare {
    _lock: Option<File>,
}

/// Waits until no test has the machine [`alone`].
pub fn beside_others() -> MachineShare {
    take(File::lock_shared)
}

/// Waits until no test is left that is [`beside_others`], and lets none begin.
pub fn alone() -> MachineShare {
    take(File::lock)
}

fn take(lock: fn(&File) -> std::io::Result<()>) -> MachineShare {
    // Inside its namespace a test has what it took outside.
    let file = (!is_inside()).then(|| {
        let test = std::env::current_exe().expect("a test knows where it is");
        let path = test.with_file_name("machine.lock");
        let file = File::create(&path).expect("a file beside the test");
        lock(&file).expect("a lock");
        file
    });
    MachineShare { _lock: file }
}
