//! Which messages a verb logs.

use tracing_subscriber::filter::{LevelFilter, Targets};

/// The levels that `RUST_LOG` chooses: one for all, or `target=level` for some, with commas between them; `default` where
/// it chooses none.
pub fn log_levels(default: LevelFilter) -> Targets {
    let chosen = std::env::var("RUST_LOG").ok();
    chosen
        .and_then(|levels| levels.parse().ok())
        .unwrap_or_else(|| Targets::new().with_default(default))
}
