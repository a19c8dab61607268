//! Pages of E2: a browser-like program that loads ten pages in turn, again and again.
//!
//! ```text
//!  curl page ─▶ curl --parallel: its objects, six at once ─▶ next page
//! ```
//!
//! The program is an untouched curl, the server an untouched nginx. A browser would know a page's objects from its HTML; here
//! a file lists them.

use anyhow::Context;
use cedos_lab_scenario::SampleSummary;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;

/// How long a transfer may stand still, or take to connect, before the program gives it up, in seconds.
const PATIENCE_S: u32 = 10; // assumed: the paper counts timeouts of wget, and does not say after what time
/// How many connections a browser opens to a server.
const CONNECTIONS: u32 = 6; // as browsers do over HTTP/1.1

/// A page: bytes of its HTML, and how many objects of what mean size it has.
#[derive(Clone, Copy)]
struct Webpage {
    html: u64,
    objects: u64,
    mean: u64,
}

const fn page(html: u64, objects: u64, mean: u64) -> Webpage {
    Webpage {
        html,
        objects,
        mean,
    }
}

/// The pages: 32 to 341 kB, 198 kB on average. The paper names none; popular pages of its time had such sizes, which is assumed.
const PAGES: [Webpage; 10] = [
    page(12_000, 4, 6_000),
    page(30_000, 20, 5_000),
    page(45_000, 30, 6_000),
    page(60_000, 40, 7_000),
    page(25_000, 15, 8_000),
    page(80_000, 25, 9_000),
    page(20_000, 10, 12_000),
    page(50_000, 35, 4_000),
    page(15_000, 8, 20_000),
    page(40_000, 45, 6_000),
];

impl Webpage {
    /// Sizes of the objects: a third to five thirds of the mean, each of them different.
    fn objects(self) -> impl Iterator<Item = u64> {
        (0..self.objects).map(move |n| self.mean * (1 + n % 5) / 3 + n)
    }

    fn bytes(self) -> u64 {
        self.html + self.objects().sum::<u64>()
    }
}

/// The mean bytes of a page, over all of them.
pub(super) fn mean_bytes() -> u64 {
    PAGES.iter().map(|page| page.bytes()).sum::<u64>() / PAGES.len() as u64
}

/// Loads pages until `$END_S` seconds after `$begun`. For each: which, when it began and ended, the bytes of what
/// arrived whole, and curl's exit code.
const SCRIPT: &str = r#"
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY no_proxy NO_PROXY LD_PRELOAD
left() { awk -v begun="$begun" -v now="$(now)" -v end="$END_S" 'BEGIN { left = end - (now - begun); printf "%.3f", (left > 0 ? left : 0) }'; }
whole='{ if ($1 == 200) sum += $2 } END { print sum + 0 }'
get() { timeout "$(left)" curl --silent --connect-timeout $PATIENCE_S --speed-limit 1 --speed-time $PATIENCE_S --write-out '%{http_code} %{size_download}\n' "$@"; }
n=0
while [ "$(left)" != 0.000 ]; do
    page=$((n % PAGES)); n=$((n + 1)); at=$(now)
    html=$(get --output /dev/null "$(cat "$AT/$page.html")"); code=$?
    objects=
    if [ $code = 0 ]; then
        objects=$(get --parallel --parallel-max $CONNECTIONS --config "$AT/$page.objects"); code=$?
    fi
    echo "$page $at $(now) $(printf '%s\n%s\n' "$html" "$objects" | awk "$whole") $code"
    # A program that fails at once does not ask without pause.
    [ $code = 0 ] || sleep 0.2
done >"$AT/$KIND.pages"
"#;

/// Writes the list of pages into a folder.
///
/// # Errors
/// The folder is not writable.
pub(super) fn write_pages(folder: &Path, origin: &str) -> anyhow::Result<()> {
    for (n, page) in PAGES.iter().enumerate() {
        let url = |bytes: u64| format!("{origin}/bytes/{bytes}");
        let mut objects = String::new();
        for bytes in page.objects() {
            let _ = writeln!(objects, "url = \"{}\"\noutput = \"/dev/null\"", url(bytes));
        }
        std::fs::write(folder.join(format!("{n}.html")), url(page.html))?;
        std::fs::write(folder.join(format!("{n}.objects")), objects)?;
    }
    Ok(())
}

/// The script that loads pages for so many seconds, and its variables.
pub(super) fn script(seconds: u64) -> (&'static str, Vec<(&'static str, String)>) {
    let variables = vec![
        ("END_S", seconds.to_string()),
        ("PATIENCE_S", PATIENCE_S.to_string()),
        ("CONNECTIONS", CONNECTIONS.to_string()),
        ("PAGES", PAGES.len().to_string()),
    ];
    (SCRIPT, variables)
}

/// The pages that a program loaded, or did not.
#[derive(Clone, Debug, Default)]
pub(super) struct PagesLoaded {
    /// Seconds that each whole page took.
    took_s: Vec<f64>,
    /// Pages of which a transfer timed out.
    timeouts: u64,
    /// Pages that failed in another way.
    failed: u64,
}

impl PagesLoaded {
    /// Reads what the script wrote.
    ///
    /// # Errors
    /// It is not there, or contains something else.
    pub(super) fn read(folder: &Path, kind: &str) -> anyhow::Result<PagesLoaded> {
        let file = folder.join(format!("{kind}.pages"));
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("{kind}: the program wrote no list of pages"))?;
        PagesLoaded::parse(&text).with_context(|| format!("{kind}: an odd list of pages"))
    }

    fn parse(text: &str) -> anyhow::Result<PagesLoaded> {
        let mut loaded = PagesLoaded::default();
        for line in text.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let [page, begun, ended, bytes, code] = fields[..] else {
                anyhow::bail!("{line}");
            };
            let page: usize = page.parse()?;
            let page = PAGES.get(page).context("there is no such page")?;
            let (begun, ended): (f64, f64) = (begun.parse()?, ended.parse()?);
            match code {
                "0" if bytes.parse::<u64>()? == page.bytes() => loaded.took_s.push(ended - begun),
                // curl: the operation timed out.
                "28" => loaded.timeouts += 1,
                // timeout(1): the run is over.
                "124" => {}
                _ => loaded.failed += 1,
            }
        }
        Ok(loaded)
    }

    /// How many pages are whole.
    pub(super) fn done(&self) -> usize {
        self.took_s.len()
    }

    /// The figures of a run.
    pub(super) fn figures(&self) -> Value {
        json!({
            "pages_done": self.done(),
            "timeouts": self.timeouts,
            "failed": self.failed,
            "page_s": SampleSummary::of(self.took_s.clone()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_counts_if_all_its_bytes_came_and_one_that_the_end_cut_off_counts_nowhere() {
        let whole = PAGES[3].bytes();
        let text = format!(
            "3 100.5 102.0 {whole} 0\n3 102.0 103.0 {} 0\n0 103.0 113.0 500 28\n1 113.0 114.0 0 7\n2 114.0 115.0 9 124\n",
            whole - 1
        );
        let loaded = PagesLoaded::parse(&text).unwrap();
        assert_eq!((loaded.done(), loaded.timeouts, loaded.failed), (1, 1, 2));
        assert_eq!(loaded.took_s, [1.5]);
        assert!(PagesLoaded::parse("10 1.0 2.0 5 0\n").is_err());
        assert!(PagesLoaded::parse("nonsense\n").is_err());
    }

    #[test]
    fn objects_of_a_page_are_files_of_different_sizes() {
        for page in PAGES {
            let mut sizes: Vec<u64> = page.objects().collect();
            assert!(
                (30_000..=400_000).contains(&page.bytes()),
                "{}",
                page.bytes()
            );
            sizes.sort_unstable();
            sizes.dedup();
            assert_eq!(sizes.len() as u64, page.objects);
        }
    }
}
