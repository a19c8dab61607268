//! Which messages a verb logs.

use std::fmt;

use cedos_terminal::LogWriter;
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The levels that `RUST_LOG` chooses: one for all, or `target=level` for some, with commas between them; `default` where
/// it chooses none.
pub fn log_levels(default: LevelFilter) -> Targets {
    let chosen = std::env::var("RUST_LOG").ok();
    chosen
        .and_then(|levels| levels.parse().ok())
        .unwrap_or_else(|| Targets::new().with_default(default))
}

/// Logs on standard error from now on what RUST_LOG chooses, and nothing without it: for verbs that tell people by
/// themselves what happens.
pub fn log_if_chosen() {
    if std::env::var_os("RUST_LOG").is_some() {
        log_warnings("cedos");
    }
}

/// Lines for people: the words alone, after the program that says them.
struct NoticeFormat(&'static str);

impl<S, N> FormatEvent<S, N> for NoticeFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "{}: ", self.0)?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

/// Shows warnings on standard error from now on, as words of `program`; with RUST_LOG what that chooses, as a log with times
/// and places in the code.
pub fn log_warnings(program: &'static str) {
    let log = tracing_subscriber::fmt::layer()
        .with_writer(LogWriter::default)
        // What is printed has no escape sequence, not even one of ours.
        .with_ansi(false);
    let levels = log_levels(LevelFilter::WARN);
    let log = match std::env::var_os("RUST_LOG") {
        Some(_) => log.with_filter(levels).boxed(),
        None => log
            .event_format(NoticeFormat(program))
            .with_filter(levels)
            .boxed(),
    };
    // A program around this one may have a log already.
    let _ = tracing_subscriber::registry().with(log).try_init();
}
