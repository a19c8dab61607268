//! `--qlog DIR`: the folder for the logs of sessions, for every verb with sessions.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::help::EXPERT;
use anyhow::Context;
use clap::{Args, ValueEnum};
use d2tp_driver::{Qlog, TraceLevel};

/// Which packets a log lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum QlogPackets {
    /// No packets, only events
    None,
    /// The first 16 of each path and one in 64 after that
    Sampled,
    /// Every packet
    All,
}

/// Options of the log.
#[derive(Debug, Args)]
pub struct QlogArgs {
    /// Write a qlog file for each session into this directory (docs/qlog.md)
    #[arg(long, value_name = "DIR", env = "QLOGDIR", help_heading = EXPERT)]
    qlog: Option<PathBuf>,
    /// Which packets the qlog lists; events and metrics are always in it
    #[arg(long, value_name = "WHICH", default_value = "sampled", help_heading = EXPERT)]
    qlog_packets: QlogPackets,
}

impl QlogArgs {
    /// Whether there is to be a log.
    pub fn is_requested(&self) -> bool {
        // An empty variable is as good as none.
        self.qlog
            .as_ref()
            .is_some_and(|f| !f.as_os_str().is_empty())
    }

    /// The folder of the log, if one was asked for.
    pub fn folder(&self) -> Option<&Path> {
        self.qlog.as_deref().filter(|_| self.is_requested())
    }

    /// The log, if one was asked for.
    ///
    /// # Errors
    /// The directory cannot be had.
    pub fn open(&self) -> anyhow::Result<Option<Arc<Qlog>>> {
        let Some(folder) = self.folder() else {
            return Ok(None);
        };
        let level = match self.qlog_packets {
            QlogPackets::None => TraceLevel::Events,
            QlogPackets::Sampled => TraceLevel::Sampled,
            QlogPackets::All => TraceLevel::Packets,
        };
        let log = Qlog::in_folder(folder, level)
            .with_context(|| format!("cannot write qlogs into {}", folder.display()))?;
        Ok(Some(log))
    }
}
