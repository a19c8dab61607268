//! `docs/messages.md`: what people read in their first hour, from real runs of the real programs.

mod normalise;
mod recorder;
mod scenes;

use std::path::Path;

use cedos_lab_rig::namespace::{SHAPED_LINKS, in_namespace_with};
use cedos_lab_rig::this_test;

/// The environment variable that makes the test write the page instead of comparing it.
const WRITE_VARIABLE: &str = "CEDOS_WRITE_MESSAGES";

#[test]
fn the_page_of_messages_has_what_the_programs_say() {
    in_namespace_with(SHAPED_LINKS, this_test!(), async || {
        let page = scenes::record().await;
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/messages.md");
        if std::env::var_os(WRITE_VARIABLE).is_some() {
            std::fs::write(&path, page).expect("written");
            return;
        }
        let kept = std::fs::read_to_string(&path).expect("docs/messages.md");
        let differs = kept.lines().zip(page.lines()).position(|(a, b)| a != b);
        let line = differs.unwrap_or_else(|| kept.lines().count().min(page.lines().count()));
        let around = |text: &str| -> String {
            let lines = text.lines().skip(line.saturating_sub(6)).take(10);
            lines.map(|line| format!("  {line}\n")).collect()
        };
        assert!(
            kept == page,
            "docs/messages.md differs from line {}. Kept:\n{}Now:\n{}{WRITE_VARIABLE}=1 cargo test -p cedos \
             --test messages writes it; read the difference before you commit it",
            line + 1,
            around(&kept),
            around(&page),
        );
    });
}
