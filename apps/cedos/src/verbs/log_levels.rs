//! Which messages a verb logs.

use cedos_terminal::LogWriter;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The levels that `RUST_LOG` chooses: one for all, or `target=level` for some, with commas between them; `default` where
/// it chooses none.
pub fn log_levels(default: LevelFilter) -> Targets {
    let chosen = std::env::var("RUST_LOG").ok();
    chosen
        .and_then(|levels| levels.parse().ok())
        .unwrap_or_else(|| Targets::new().with_default(default))
}

/// Logs warnings on standard error from now on, and more with RUST_LOG.
pub fn log_warnings() {
    let log = tracing_subscriber::fmt::layer()
        .with_writer(LogWriter::default)
        // What is printed has no escape sequence, not even one of ours.
        .with_ansi(false)
        .without_time();
    // A program around this one may have a log already.
    let _ = tracing_subscriber::registry()
        .with(log.with_filter(log_levels(LevelFilter::WARN)))
        .try_init();
}
