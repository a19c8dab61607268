//! What a process gives up once it knows what it needs: files, system calls, capabilities.
//!
//! ```text
//!  ProcessSandbox::new(files, calls)      before the process has threads
//!      ├─ no_new_privs                    programs that it starts gain no rights
//!      ├─ capabilities.rs                 all but those that are named
//!      ├─ file_access.rs                  Landlock: only the files and folders that are named
//!      └─ system_calls.rs                 seccomp: only the calls of a list
//!
//!  confined(|| parse(bytes))              a thread that reaches no file, no network and no program
//!  keep_free_heap(), release_free_heap()  memory that is free: how much the C library keeps (heap.rs)
//! ```
//!
//! Threads and programs that a process starts inherit all of it, and none of it can be taken back. A kernel without one
//! of these parts gets the others: [`SandboxReport`] says which hold, and why others do not.
//!
//! A confined thread shares the memory of its process. That bounds what parsers can do by mistake (follow a link to a
//! file, load an external entity, connect); it is no boundary for code that corrupts memory. Against that, there is the
//! sandbox of the whole process.

mod capabilities;
mod confined_call;
mod file_access;
mod heap;
mod sandbox_report;
mod system_calls;

pub use confined_call::{confined, set_confinement};
pub use file_access::{FileAccess, check_file_restriction, loaded_libraries, program_loader};
pub use heap::{keep_free_heap, limit_heap_arenas, release_free_heap};
pub use rustix::thread::CapabilitySet;
pub use sandbox_report::{SandboxPart, SandboxReport};
pub use system_calls::ProgramStarts;

/// What a process may still do after [`ProcessSandbox::enter`].
///
/// ```no_run
/// use cedos_sandbox::{CapabilitySet, FileAccess, ProcessSandbox, ProgramStarts};
///
/// let mut files = FileAccess::default();
/// files.write("/var/lib/example").read("/etc/example");
/// let sandbox = ProcessSandbox {
///     files,
///     starts: ProgramStarts::Refused,
///     capabilities: CapabilitySet::empty(),
/// };
/// println!("{}", sandbox.enter());
/// ```
#[derive(Debug)]
pub struct ProcessSandbox {
    /// Files and folders that it reads, writes and runs.
    pub files: FileAccess,
    /// Whether the process may become another program.
    pub starts: ProgramStarts,
    /// Capabilities that it keeps, if it has them.
    pub capabilities: CapabilitySet,
}

impl ProcessSandbox {
    /// Gives everything else up, for the calling thread and those that it starts: call it before there are others.
    ///
    /// A part that the kernel does not have is in the report; the others hold all the same.
    pub fn enter(self) -> SandboxReport {
        let no_new_privs =
            rustix::thread::set_no_new_privs(true).map_err(|error| error.to_string());
        // In this order: the filter refuses what the parts before it need.
        let capabilities = capabilities::keep_only(self.capabilities);
        let files = self.files.restrict();
        let calls = system_calls::restrict_process(self.starts);
        SandboxReport {
            no_new_privs,
            capabilities,
            files,
            calls,
        }
    }
}

/// Gives up new privileges and all capabilities but `kept`, and nothing else: for a helper that reaches what no sandbox lets a
/// process reach. Threads and programs that the calling thread starts inherit it.
///
/// # Errors
/// The kernel refuses; in words.
pub fn keep_capabilities(kept: CapabilitySet) -> Result<(), String> {
    rustix::thread::set_no_new_privs(true).map_err(|error| error.to_string())?;
    capabilities::keep_only(kept)
}
