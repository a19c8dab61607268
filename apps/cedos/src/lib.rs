//! The verbs of `cedos`: one file per verb in `verbs/`. Two programs include them, `cedos` itself
//! and the laboratory's `cedos-lab`, which runs them on emulated networks.
//!
//! Threads are started per verb: `run` and the laboratory must enter their namespaces before there
//! are any.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod browser;
pub mod companion_program;
mod foreign_options;
pub mod help;
mod pairing;
mod run;
mod serve;
mod verbs;
mod vpn;

use std::ffi::OsString;
use std::future::Future;
use std::io::ErrorKind;
use std::pin::Pin;
use std::process::ExitCode;

use anyhow::Context;
use cedos_agent::settings::{SettingsError, UserSettings};
use cedos_terminal::{print_stderr, stdout_result};
use clap::{Parser, Subcommand};

pub use verbs::completions::{CompletionsArgs, ManPagesArgs};

/// What the exit codes of all verbs mean, but `run`'s and `play`'s: those are the program's.
pub const EXIT_CODES: &str = "\
Exit codes:
  0   Done; a transfer is complete and on time
  1   Error (see the message)
  2   Wrong usage; nothing was done
  3   Stopped (Ctrl-C, cancel); run the same command to resume
  10  The deadline passed; the file may still be complete
  11  The data limit for metered networks is used up
  12  The content does not match --integrity
  13  The server keeps sending different content
  14  No network may be used, and --now does not wait
  75  status: the transfer has not ended
`run` and `play` exit with the code of the program that they run.";

/// A verb of the product, with its command line.
#[expect(missing_docs, reason = "the command line of each verb describes it")]
#[derive(Debug, Subcommand)]
pub enum ProductVerb {
    Get(Box<verbs::get::GetArgs>),
    Put(Box<verbs::put::PutArgs>),
    Sync(Box<verbs::sync::SyncArgs>),
    Url(Box<verbs::url::UrlArgs>),
    Play(Box<verbs::play::PlayArgs>),
    Ls(verbs::get_jobs::LsArgs),
    /// Show one transfer in the background
    ///
    /// Exit codes: 75 while it runs or waits, then those of the transfer (see `cedos get --help`).
    Status(verbs::get_jobs::JobArgs),
    /// Show why a transfer runs or waits, its forecast, and what would end the wait
    ///
    /// Exit codes: 0 done, 1 there is no such transfer, 2 usage.
    Why(verbs::get_jobs::JobArgs),
    /// Pause transfers of the agent
    ///
    /// Exit codes: 0 done, 1 one is not a transfer of the agent, or has ended, 2 usage.
    Pause(verbs::get_jobs::JobsArgs),
    /// Resume paused transfers
    ///
    /// Exit codes: as `cedos pause`.
    Resume(verbs::get_jobs::JobsArgs),
    /// Stop transfers; `retry`, or the same command, resumes a download later
    ///
    /// Exit codes: 0 stopped, 1 there is no such transfer, or one has ended, 2 usage.
    Cancel(verbs::get_jobs::JobsArgs),
    /// Resume transfers that failed or were cancelled
    ///
    /// Exit codes: 0 started, 1 one is not a transfer of the agent, or did not fail, 2 usage.
    Retry(verbs::get_jobs::JobsArgs),
    Edit(Box<verbs::get_jobs::EditArgs>),
    /// Wait until transfers end, all of them or those that are named
    ///
    /// Exit codes: those of the first transfer that fails (see `cedos get --help`); 1 there is no such
    /// transfer; 75 the agent stopped before a transfer ended.
    Wait(verbs::get_jobs::WaitArgs),
    Cast(verbs::cast::CastArgs),
    Net(verbs::net::NetArgs),
    Budget(verbs::net::BudgetArgs),
    Page(verbs::page::PageArgs),
    Browser(verbs::browser::BrowserArgs),
    Agent(Box<verbs::agent::AgentArgs>),
    Prox(Box<verbs::prox::ProxArgs>),
    Bridge(verbs::bridge::BridgeArgs),
    Join(verbs::join::JoinArgs),
    Config(verbs::config::ConfigArgs),
    Doctor(verbs::doctor::DoctorArgs),
    Serve(Box<verbs::serve::ServeArgs>),
    Send(Box<verbs::send::SendArgs>),
    Receive(Box<verbs::receive::ReceiveArgs>),
    Run(Box<verbs::run::RunArgs>),
    Vpn(Box<verbs::vpn::VpnArgs>),
    /// Make and show keys of devices and proxies
    Key(verbs::key::KeyArgs),
}

impl ProductVerb {
    /// Carries the verb out. Must be called before the program starts threads.
    #[must_use]
    pub fn run(self) -> ExitCode {
        cedos_sandbox::keep_free_heap();
        // Settings that make no sense end the verbs that need them.
        if let Ok(settings) = UserSettings::load(None) {
            settings.use_http_proxy();
            settings.use_local_hints();
        }
        let (verb, result) = self.name_and_result();
        exit_code(&format!("cedos {verb}"), result)
    }

    fn name_and_result(self) -> (&'static str, anyhow::Result<ExitCode>) {
        match self {
            Self::Get(args) => (
                "get",
                on_runtime(1, async move { Ok(verbs::get::run(*args).await) }),
            ),
            Self::Put(args) => (
                "put",
                on_runtime(1, async move { Ok(verbs::put::run(*args).await) }),
            ),
            Self::Sync(args) => (
                "sync",
                on_runtime(1, async move { Ok(verbs::sync::run(*args).await) }),
            ),
            Self::Url(args) => (
                "url",
                on_runtime(1, async move { Ok(verbs::url::run(*args).await) }),
            ),
            Self::Play(args) => (
                "play",
                on_runtime(1, async move { Ok(verbs::play::run(*args).await) }),
            ),
            Self::Ls(args) => ("ls", on_runtime(1, verbs::get_jobs::ls(args))),
            Self::Status(args) => ("status", on_runtime(1, verbs::get_jobs::status(args))),
            Self::Why(args) => ("why", on_runtime(1, verbs::get_jobs::why(args))),
            Self::Pause(args) => ("pause", on_runtime(1, verbs::get_jobs::pause(args))),
            Self::Resume(args) => ("resume", on_runtime(1, verbs::get_jobs::resume(args))),
            Self::Cancel(args) => ("cancel", on_runtime(1, verbs::get_jobs::cancel(args))),
            Self::Retry(args) => ("retry", on_runtime(1, verbs::get_jobs::retry(args))),
            Self::Edit(args) => ("edit", on_runtime(1, verbs::get_jobs::edit(*args))),
            Self::Wait(args) => ("wait", on_runtime(1, verbs::get_jobs::wait(args))),
            Self::Cast(args) => ("cast", on_runtime(1, verbs::cast::run(args))),
            Self::Net(args) => ("net", on_runtime(1, verbs::net::net(args))),
            Self::Budget(args) => ("budget", on_runtime(1, verbs::net::budget(args))),
            Self::Page(args) => ("page", on_runtime(1, verbs::page::run(args))),
            Self::Browser(args) => ("browser", on_runtime(1, verbs::browser::run(args))),
            Self::Agent(args) => (
                "agent",
                match verbs::agent::keep_queues(&args) {
                    Some(done) => done.map(|()| ExitCode::SUCCESS),
                    None => verbs::agent::prepare(&args)
                        .and_then(|start| on_runtime(1, verbs::agent::run(*args, start))),
                },
            ),
            Self::Prox(mut args) => (
                "prox",
                verbs::prox_sandbox::enter(&mut args).and_then(|sandbox| {
                    cedos_sandbox::limit_heap_arenas(PROX_HEAP_ARENAS_MAX);
                    on_runtime(PROX_THREADS_MAX, async move {
                        verbs::prox_process::run(*args, sandbox).await
                    })
                }),
            ),
            Self::Bridge(args) => ("bridge", on_runtime(1, verbs::bridge::run(args))),
            Self::Join(args) => ("join", on_runtime(1, verbs::join::run(args))),
            Self::Config(args) => ("config", verbs::config::run(args)),
            Self::Doctor(args) => ("doctor", on_runtime(1, verbs::doctor::run(args))),
            Self::Serve(args) => (
                "serve",
                on_runtime(PROX_THREADS_MAX, async move {
                    verbs::serve::run(*args).await.map(|()| ExitCode::SUCCESS)
                }),
            ),
            Self::Send(args) => (
                "send",
                on_runtime(1, async move { Ok(verbs::send::run(*args).await) }),
            ),
            Self::Receive(args) => (
                "receive",
                on_runtime(1, async move { Ok(verbs::receive::run(*args).await) }),
            ),
            Self::Run(args) => ("run", verbs::run::run(*args)),
            Self::Vpn(args) => ("vpn", on_runtime(2, verbs::vpn::run(*args))),
            Self::Key(args) => ("key", verbs::key::run(&args).map(|()| ExitCode::SUCCESS)),
        }
    }
}

/// What a program ends with: an error is printed after the words it was called by, and so is output that
/// could not be written. A closed pipe is no error.
pub fn exit_code(program: &str, result: anyhow::Result<ExitCode>) -> ExitCode {
    let mut said = None;
    let code = result.unwrap_or_else(|error| {
        let text = format!("{error:#}");
        print_stderr(&format!("{program}: {text}"));
        said = Some(text);
        match error.is::<SettingsError>() {
            true => ExitCode::from(2),
            false => ExitCode::FAILURE,
        }
    });
    match stdout_result() {
        Err(error) => {
            let text = error.to_string();
            if said.as_ref() != Some(&text) {
                print_stderr(&format!("{program}: {text}"));
            }
            match code == ExitCode::SUCCESS {
                true => ExitCode::FAILURE,
                false => code,
            }
        }
        Ok(()) => code,
    }
}

/// Reads the command line. Help, version and mistakes are printed here.
///
/// # Errors
/// The exit code with which the program is to end.
pub fn parse_arguments<C: Parser>(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<C, ExitCode> {
    let mut command = help::with_examples_and_groups(C::command());
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let texts = arguments
        .iter()
        .map(|text| text.to_string_lossy().into_owned());
    let texts: Vec<String> = texts.collect();
    let matches = command.try_get_matches_from_mut(arguments);
    matches
        .and_then(|matches| C::from_arg_matches(&matches))
        .map_err(|mut error| {
            foreign_options::explain(&mut error, &texts);
            usage_exit(&error.format(&mut command))
        })
}

/// Prints help, version or a mistake in the command line, and returns the exit code for it.
pub fn usage_exit(error: &clap::Error) -> ExitCode {
    match error.print() {
        Err(output) if output.kind() != ErrorKind::BrokenPipe && !error.use_stderr() => {
            print_stderr(&format!("cedos: cannot write to standard output: {output}"));
            ExitCode::FAILURE
        }
        _ => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)),
    }
}

/// Threads of a proxy at most: the transport is one task, origins and disks are the others.
const PROX_THREADS_MAX: usize = 4; // a guess

/// Parts of a proxy's heap at most: with more of them more free memory is kept when many devices have fallen asleep, with
/// fewer threads wait for each other. One for each thread that works; those that block on disks share them.
const PROX_HEAP_ARENAS_MAX: u8 = PROX_THREADS_MAX as u8;

/// Runs a verb that waits on many things, on as many threads as there are cores for them.
fn on_runtime(
    threads_max: usize,
    verb: impl Future<Output = anyhow::Result<ExitCode>>,
) -> anyhow::Result<ExitCode> {
    run_boxed(threads_max, Box::pin(verb))
}

/// Boxed, since each kind of runtime would otherwise contain a copy of each verb.
fn run_boxed(
    threads_max: usize,
    verb: Pin<Box<dyn Future<Output = anyhow::Result<ExitCode>> + '_>>,
) -> anyhow::Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut builder = if threads_max.min(cores) == 1 {
        tokio::runtime::Builder::new_current_thread()
    } else {
        tokio::runtime::Builder::new_multi_thread()
    };
    builder
        .worker_threads(threads_max.min(cores))
        .enable_all()
        .build()
        .context("cannot start")?
        .block_on(verb)
}

#[cfg(test)]
mod tests {
    use cedos_agent::fetch::outcome::TransferExit;

    #[test]
    fn the_help_names_every_exit_code() {
        let lines: Vec<&str> = super::EXIT_CODES.lines().collect();
        for exit in TransferExit::ALL {
            let number = (exit as u8).to_string();
            let told = lines
                .iter()
                .any(|line| line.split_whitespace().next() == Some(&number));
            assert!(told, "{number}");
        }
    }
}
