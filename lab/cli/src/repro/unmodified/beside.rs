//! The undisturbed case: a download, a page and a film, directly and through Cedos, in turn on the
//! same link.

use super::site::{AGENT, OBJECT_BYTES, ProgramFolder, page_sum};
use anyhow::ensure;
use cedos_lab_scenario::SampleSummary;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// The size of a download in bytes.
const DOWNLOAD_BYTES: u64 = 10_000_000;
/// How often a download is timed for each way.
const DOWNLOADS: usize = 5;
/// How often a browser is started for each way, and how often it loads the page; the first load
/// shows the start.
const BROWSERS: usize = 3;
const LOADS: usize = 4;
const OBJECTS: u64 = 40;
/// The length of the beginning of a film in seconds.
const SHOWN_S: u32 = 12;
/// How often the beginning of a film is played.
const FILMS: usize = 3;

const QUIET: &str = r#"
seed = 11
duration_s = 300
origin = "builtin"
[[link]]
name = "wlan0"
down_mbps = 40
up_mbps = 40
rtt_ms = 20
"#;

/// Times in seconds for each thing: directly, and through Cedos.
pub type TimedResults = Map<String, Value>;

/// A thing to be timed: what it needs, and the script that appends its seconds to `$AT/NAME.direct`
/// and `.through`.
struct TimedProgram {
    name: &'static str,
    needs: &'static [&'static str],
    makes: &'static [&'static str],
    script: fn() -> String,
    n: usize,
}

const TIMED: [TimedProgram; 3] = [
    TimedProgram {
        name: "download",
        needs: &["curl"],
        makes: &[],
        script: download,
        n: DOWNLOADS,
    },
    TimedProgram {
        name: "page",
        needs: &["chromium", "nginx"],
        makes: &[],
        script: page,
        n: BROWSERS * (LOADS - 1),
    },
    TimedProgram {
        name: "video",
        needs: &["mpv", "ffmpeg", "nginx"],
        makes: &[super::site::CLIP_MAKE],
        script: video,
        n: FILMS,
    },
];

fn download() -> String {
    let fetch = format!(
        "curl -sS -o /dev/null -w '%{{time_total}}\\n' $CEDOS_LAB_ORIGIN/bytes/{DOWNLOAD_BYTES}"
    );
    let both = format!("{fetch} >>$AT/download.direct\n$RUN {fetch} >>$AT/download.through\n");
    both.repeat(DOWNLOADS)
}

fn page() -> String {
    let mut text = String::new();
    for n in 0..BROWSERS {
        for (way, proxy) in [("direct", "none"), ("through", "$AGENT_PROXY")] {
            let _ = writeln!(
                text,
                "timeout 60 sh $AT/browse.sh chromium {way}{n} {proxy} \
                 \"http://$ORIGIN:8081/page.html?who={way}{n}&times={LOADS}&objects={OBJECTS}&first={OBJECTS}\" 2>>$AT/page.errors"
            );
        }
    }
    text
}

fn video() -> String {
    let show = format!(
        "mpv --no-config --really-quiet --vo=null --ao=null --end={SHOWN_S} --script=$AT/played.lua \
         http://$ORIGIN:8081/clip.webm"
    );
    let timed = |way: &str, run: &str| {
        format!(
            "begun=$(now); env OUT=$AT/shown {run} {show}; ended=$(now)\n\
             grep -q '^eof' $AT/shown && echo \"$begun $ended\" | awk '{{ printf \"%.3f\\n\", $2 - $1 }}' \
             >>$AT/video.{way}; rm -f $AT/shown\n"
        )
    };
    let both = timed("direct", "") + &timed("through", "$RUN");
    both.repeat(FILMS)
}

/// The times of each thing, our ratio to the direct ones, and what was not timed. There are no
/// figures if nothing could be timed.
///
/// # Errors
/// There is no lab, or something was not timed often enough.
pub fn run(site: &ProgramFolder) -> anyhow::Result<(Value, Value, Vec<String>)> {
    let (mut ready, mut missing) = (Vec::new(), Vec::new());
    let mut script = AGENT.to_owned();
    for timed in TIMED {
        match site.make(timed.needs, timed.makes) {
            Ok(()) => {
                script += &site.filled(&(timed.script)(), "");
                ready.push(timed);
            }
            Err(why) => missing.push(format!("not timed: {}: {why}", timed.name)),
        }
    }
    if ready.is_empty() {
        return Ok((json!({}), json!({}), missing));
    }
    script += "kill $agent\n";
    let before = site.text("reports").lines().count();
    site.lab(QUIET, &script)?;
    let reports = site.text("reports");
    let reports: Vec<&str> = reports.lines().skip(before).collect();
    let (mut through, mut direct, mut slower) = (
        TimedResults::new(),
        TimedResults::new(),
        TimedResults::new(),
    );
    for timed in &ready {
        let times = |way: &str| match timed.name {
            "page" => loads(&reports, way),
            name => {
                let text = site.text(&format!("{name}.{way}"));
                text.lines()
                    .filter_map(|line| line.trim().parse().ok())
                    .collect()
            }
        };
        let (ours, theirs) = (times("through"), times("direct"));
        ensure!(
            ours.len() == timed.n && theirs.len() == timed.n,
            "{}: {} and {} times of {}",
            timed.name,
            ours.len(),
            theirs.len(),
            timed.n
        );
        let (ours, theirs) = (SampleSummary::of(ours), SampleSummary::of(theirs));
        let more = ours.p50.zip(theirs.p50);
        let more = more.map(|(ours, theirs)| 100.0 * (ours / theirs - 1.0));
        slower.insert(timed.name.to_owned(), json!(more));
        through.insert(timed.name.to_owned(), json!(ours));
        direct.insert(timed.name.to_owned(), json!(theirs));
    }
    let ours = json!({ "through_s": through, "slower_pct": slower });
    Ok((ours, json!({ "direct_s": direct }), missing))
}

/// The seconds of each complete load of a page, except a browser's first one, from the pages'
/// reports.
fn loads(reports: &[&str], way: &str) -> Vec<f64> {
    let wanted = (page_sum(OBJECTS).to_string(), OBJECTS * OBJECT_BYTES);
    let of = format!("who={way}");
    let seconds = |line: &&str| {
        let figure = |name: &str| {
            let mut pairs = line.split('&').filter_map(|pair| pair.split_once('='));
            pairs.find_map(|(key, value)| (key == name).then_some(value))
        };
        let first = figure("times")? == LOADS.to_string();
        let whole = figure("sum")? == wanted.0 && figure("bytes")? == wanted.1.to_string();
        let ms: f64 = figure("ms")?.parse().ok()?;
        (whole && !first).then_some(ms / 1000.0)
    };
    let lines = reports.iter().filter(|line| line.starts_with(&of));
    lines.filter_map(seconds).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_counts_if_it_is_whole_and_not_the_browsers_first() {
        let bytes = OBJECTS * OBJECT_BYTES;
        let line = |who: &str, times: usize, sum: u32| {
            format!("who={who}&times={times}&sum={sum}&bytes={bytes}&ms=1500&silent_s=0.1")
        };
        let sum = page_sum(OBJECTS);
        let said = [
            line("direct0", LOADS, sum),
            line("direct0", 2, sum),
            line("direct1", 1, sum ^ 1),
            line("through0", 1, sum),
            "who=direct2&times=1&failed=Error".to_owned(),
        ];
        let said: Vec<&str> = said.iter().map(String::as_str).collect();
        assert_eq!(loads(&said, "direct"), [1.5]);
        assert_eq!(loads(&said, "through"), [1.5]);
    }
}
