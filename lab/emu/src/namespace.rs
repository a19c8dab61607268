//! A network namespace, with a thread in it that runs work there on request.
//!
//! The namespace has no name in the file system, and files are mounted only for the programs in it,
//! so nothing can be left behind: it is gone when its thread, the threads and processes started
//! from it, and its sockets are gone. Processes started from it get SIGKILL when the thread ends,
//! at the latest with this process.

use crate::network::NamespaceNetwork;
use anyhow::{Context, anyhow};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};

type NamespaceJob = Box<dyn FnOnce(&mut NamespaceNetwork) + Send>;

/// A network namespace of the lab.
pub struct Namespace {
    name: String,
    jobs: Option<Sender<NamespaceJob>>,
    thread: Option<JoinHandle<()>>,
    /// The file that its programs see as `/etc/hosts`.
    hosts: Option<CString>,
}

impl Namespace {
    /// Creates an empty network namespace with its loopback up.
    ///
    /// # Errors
    /// The system refuses it; see [`crate::enter`].
    pub fn new(name: &str) -> anyhow::Result<Namespace> {
        let (jobs, inbox) = channel::<NamespaceJob>();
        let (ready, wait) = channel();
        let thread = Builder::new().name(format!("lab-{name}")).spawn(move || {
            let made = unshare(CloneFlags::CLONE_NEWNET)
                .context("a network namespace cannot be made")
                .and_then(|()| NamespaceNetwork::open());
            let mut network = match made {
                Ok(network) => {
                    let _ = ready.send(Ok(()));
                    network
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                    return;
                }
            };
            while let Ok(job) = inbox.recv() {
                job(&mut network);
            }
        })?;
        wait.recv()
            .unwrap_or_else(|_| Err(anyhow!("the thread of namespace {name} died")))?;
        Ok(Namespace {
            name: name.to_owned(),
            jobs: Some(jobs),
            thread: Some(thread),
            hosts: None,
        })
    }

    /// Makes programs that are started from now on see `file` as `/etc/hosts`, in their own mount
    /// namespace. Returns whether the system permits that.
    pub(crate) fn name_hosts(&mut self, file: &Path) -> bool {
        let Ok(file) = CString::new(file.as_os_str().as_bytes()) else {
            return false;
        };
        let tried = file.clone();
        // Tried on a thread that ends at once.
        let works = std::thread::spawn(move || see_hosts(&tried).is_ok()).join();
        self.hosts = works.unwrap_or(false).then_some(file);
        self.hosts.is_some()
    }

    /// The name of the namespace.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `work` in the namespace and returns its result. Sockets and threads created there stay
    /// there.
    ///
    /// # Errors
    /// `work` panicked.
    pub fn run<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut NamespaceNetwork) -> R + Send + 'static,
    ) -> anyhow::Result<R> {
        let (done, wait) = channel();
        let job: NamespaceJob = Box::new(move |network| {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(network)));
            let _ = done.send(result);
        });
        let gone = || anyhow!("namespace {} is gone", self.name);
        self.jobs
            .as_ref()
            .ok_or_else(gone)?
            .send(job)
            .map_err(|_| gone())?;
        let result = wait.recv().map_err(|_| gone())?;
        result.map_err(|_| anyhow!("work in namespace {} panicked", self.name))
    }

    /// Starts a program in the namespace. It is killed when the namespace is dropped.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn spawn(&self, mut command: Command) -> anyhow::Result<Child> {
        let program = command.get_program().to_string_lossy().into_owned();
        let hosts = self.hosts.clone();
        // SAFETY: between fork and exec only plain system calls are made, with memory allocated
        // before.
        unsafe {
            command.pre_exec(move || {
                prctl::set_pdeathsig(Signal::SIGKILL)?;
                match &hosts {
                    Some(file) => Ok(see_hosts(file)?),
                    None => Ok(()),
                }
            });
        }
        self.run(move |_| command.spawn())?
            .with_context(|| format!("{program} cannot be started in namespace {}", self.name))
    }

    /// Starts a thread in the namespace.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn thread(
        &self,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> anyhow::Result<JoinHandle<()>> {
        let builder = Builder::new().name(format!("{}-{name}", self.name));
        Ok(self.run(move |_| builder.spawn(work))??)
    }
}

/// Mounts `file` over `/etc/hosts`, for the calling thread and its child processes.
fn see_hosts(file: &CStr) -> nix::Result<()> {
    const NONE: Option<&CStr> = None;
    unshare(CloneFlags::CLONE_NEWNS)?;
    // The mount must not appear in other namespaces.
    mount(
        NONE,
        c"/",
        NONE,
        MsFlags::MS_REC | MsFlags::MS_PRIVATE,
        NONE,
    )?;
    mount(Some(file), c"/etc/hosts", NONE, MsFlags::MS_BIND, NONE)
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
