//! Shares the machine among tests: tests that measure it run beside each other, and a test that
//! loads it runs alone.
//!
//! It uses a lock on a file beside the test programs, so it is valid between threads of one program
//! and between programs.

use std::fs::File;

use crate::namespace::is_inside;

/// A share of the machine, as long as it is held.
#[must_use]
pub struct MachineShare {
    _lock: Option<File>,
}

/// Waits until no test runs [`alone`].
pub fn beside_others() -> MachineShare {
    take(File::lock_shared)
}

/// Waits until no test runs [`beside_others`], and lets none begin.
pub fn alone() -> MachineShare {
    take(File::lock)
}

fn take(lock: fn(&File) -> std::io::Result<()>) -> MachineShare {
    // A test inside its namespace has the share that it took outside.
    let file = (!is_inside()).then(|| {
        let test = std::env::current_exe().expect("a test knows where it is");
        let path = test.with_file_name("machine.lock");
        let file = File::create(&path).expect("a file beside the test");
        lock(&file).expect("a lock");
        file
    });
    MachineShare { _lock: file }
}
