//! C11: programs as they are, all at once, through changes of network and a minute without any.
//!
//! ```text
//!  wlan0 ├────┤                                        ┊          ├──────────
//!  wwan0       ├─────┤             60 s                ├─────────────────────
//!        0    3 3.5  7                                 67         72
//! ```
//!
//! Each has its own `cedos run`, and with it a session. Links come back with another address.

use super::emulated::command_in_lab;
use super::{Measured, spread::Spread};
use anyhow::Context;
use cedos_lab_scenario::content;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// What each program fetches: together more than the links carry before the outage.
const BYTES: u64 = 2_500_000;
const SEED: u64 = 11;
/// Bytes of a fetch whose time is taken, and how often.
const TIMED_BYTES: u64 = 10_000_000;
const TIMED: usize = 5;

const DISTURBED: &str = r#"
seed = 11
duration_s = 240
origin = "builtin"
[[link]]
name = "wlan0"
down_mbps = 8
up_mbps = 8
rtt_ms = 20
[[link.at]]
t_s = 3
up = false
[[link.at]]
t_s = 72
up = true
[[link]]
name = "wwan0"
class = "metered"
up = false
down_mbps = 8
up_mbps = 4
rtt_ms = 50
[[link.at]]
t_s = 3.5
up = true
[[link.at]]
t_s = 7
up = false
[[link.at]]
t_s = 67
up = true
"#;

const QUIET: &str = r#"
seed = 11
duration_s = 240
origin = "builtin"
[[link]]
name = "wlan0"
down_mbps = 40
up_mbps = 40
rtt_ms = 20
"#;

/// A program as it is, and how it is called: `$URL`, `$OUT`, `$AT` (this folder).
struct Program {
    name: &'static str,
    /// What it takes, and what makes it, if it must be made.
    needs: &'static [&'static str],
    make: Option<&'static str>,
    call: &'static str,
}

const PROGRAMS: &[Program] = &[
    Program {
        name: "curl",
        needs: &["curl"],
        make: None,
        call: "curl -sS -o $OUT $URL",
    },
    Program {
        name: "wget",
        needs: &["wget"],
        make: None,
        // It would make up for a broken connection by itself.
        call: "wget -q --tries=1 -O $OUT $URL",
    },
    Program {
        name: "python",
        needs: &["python3"],
        make: None,
        call: "python3 -c 'import sys,shutil,urllib.request as r; \
               r.install_opener(r.build_opener(r.ProxyHandler({}))); \
               shutil.copyfileobj(r.urlopen(sys.argv[1]), open(sys.argv[2], \"wb\"))' $URL $OUT",
    },
    Program {
        name: "requests",
        needs: &["python3"],
        make: Some("python3 -c 'import requests'"),
        call: "python3 -c 'import sys,shutil,requests; \
               shutil.copyfileobj(requests.get(sys.argv[1], stream=True).raw, open(sys.argv[2], \"wb\"))' $URL $OUT",
    },
    Program {
        name: "ffmpeg",
        needs: &["ffmpeg"],
        make: None,
        // Bytes as they are, by its own HTTP.
        call: "ffmpeg -v error -y -f data -i $URL -map 0 -c copy -f data $OUT",
    },
    Program {
        name: "aria2",
        needs: &["aria2c"],
        make: None,
        // Its own patience is 60 s: it may ask again.
        call: "sh -c 'exec aria2c -q -d \"${1%/*}\" -o \"${1##*/}\" \"$0\"' $URL $OUT",
    },
    Program {
        name: "jvm",
        needs: &["java", "javac"],
        make: Some("javac -d $AT $AT/Fetch.java"),
        call: "java -cp $AT Fetch $URL $OUT",
    },
    Program {
        name: "go",
        needs: &["go"],
        make: Some("CGO_ENABLED=0 go build -o $AT/fetch-go $AT/fetch.go"),
        call: "$AT/fetch-go $URL >$OUT",
    },
    Program {
        name: "static",
        needs: &["cc"],
        make: Some("cc -static -o $AT/fetch-static $AT/fetch.c"),
        call: "$AT/fetch-static wait $HOST 80 /bytes/$BYTES >$OUT.head",
    },
];

/// Of the row's table, what no run here does, and why.
const NOT_RUN: [(&str, &str); 3] = [
    (
        "nginx as an origin, git clone",
        "run by the tests (apps/cedos/tests/run.rs), without a switch",
    ),
    (
        "ssh, rsync",
        "the lab's origin has no ssh server; so no keystroke latency either",
    ),
    (
        "mpv, VLC, Chromium, Firefox",
        "nothing here drives them yet",
    ),
];

/// On real sockets.
///
/// # Errors
/// There is no lab, or it could not follow the scenario.
pub fn emulate() -> anyhow::Result<Measured> {
    let folder = tempfile::tempdir().context("no temporary folder")?;
    let at = folder.path();
    for (name, text) in [
        ("fetch.c", include_str!("programs/fetch.c")),
        ("fetch.go", include_str!("programs/fetch.go")),
        ("Fetch.java", include_str!("programs/Fetch.java")),
    ] {
        std::fs::write(at.join(name), text)?;
    }
    let (mut ready, mut missing) = (Vec::new(), Vec::new());
    for program in PROGRAMS {
        match made(program, at) {
            Ok(()) => ready.push(program),
            Err(why) => missing.push(format!("{}: {why}", program.name)),
        }
    }
    command_in_lab(DISTURBED, &script(&ready, at)?)?;
    let wanted = content::sha256(SEED, BYTES);
    let mut programs = serde_json::Map::new();
    let mut whole = 0;
    for program in &ready {
        let told = outcome(program, at, &wanted);
        whole += u64::from(told["whole"] == json!(true));
        programs.insert(program.name.to_owned(), told);
    }
    let (direct, through) = timed(at)?;
    let slower = 100.0 * (median(&through) / median(&direct) - 1.0);
    let mut conditions = vec![
        "all programs at once, each with its own session; 60 s without a network; links come back with \
         another address"
            .to_owned(),
        format!("slower_pct: medians of {TIMED} each, interleaved, {TIMED_BYTES} bytes by curl at 40 Mb/s"),
        "the programs are what the distribution ships, or what their compiler made of a client that knows \
         nothing of us; both runs are of the same file"
            .to_owned(),
    ];
    conditions.extend(NOT_RUN.map(|(what, why)| format!("not run: {what}: {why}")));
    conditions.extend(missing.into_iter().map(|why| format!("not run: {why}")));
    Ok(Measured {
        ours: json!({
            "programs": programs,
            "run": ready.len(),
            "whole": whole,
            "through_s": Spread::of(through),
            "slower_pct": slower,
        }),
        baseline: json!({ "direct_s": Spread::of(direct) }),
        mark: vec!["whole == run".to_owned(), "slower_pct <= 5".to_owned()],
        conditions,
    })
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

fn filled(text: &str, program: &str, at: &Path) -> String {
    let shown = at.display();
    text.replace("$AT", &shown.to_string())
        .replace("$OUT", &format!("{shown}/{program}.out"))
        .replace("$HOST", "${CEDOS_LAB_ORIGIN#http://}")
        .replace("$URL", &format!("$CEDOS_LAB_ORIGIN/bytes/{BYTES}"))
        .replace("$BYTES", &BYTES.to_string())
}

fn made(program: &Program, at: &Path) -> Result<(), String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    for needed in program.needs {
        if !std::env::split_paths(&path).any(|folder| folder.join(needed).is_file()) {
            return Err(format!("{needed} is not installed here"));
        }
    }
    let Some(make) = program.make else {
        return Ok(());
    };
    let made = Command::new("sh")
        .args(["-c", &filled(make, program.name, at)])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    match made.status.success() {
        true => Ok(()),
        false => Err(format!("it cannot be built here: {make}")),
    }
}

fn this_program() -> anyhow::Result<String> {
    let program = std::env::current_exe().context("this program's own file is not known")?;
    Ok(program.display().to_string())
}

/// All programs at once; of each, its exit code and how long it took.
fn script(programs: &[&Program], at: &Path) -> anyhow::Result<String> {
    let cedos = this_program()?;
    let mut text = String::from("now() { date +%s.%N; }\nexport CEDOS_PROX=\"$CEDOS_LAB_PROX\"\n");
    for program in programs {
        let name = program.name;
        let call = filled(program.call, name, at);
        let shown = at.display();
        writeln!(
            text,
            "( begun=$(now); {cedos} run -- {call} 2>{shown}/{name}.errors; \
             echo \"$? $begun $(now)\" >{shown}/{name}.ended ) &"
        )?;
    }
    text.push_str("wait\n");
    Ok(text)
}

/// What came of a program.
fn outcome(program: &Program, at: &Path, wanted: &[u8; 32]) -> Value {
    use sha2::{Digest as _, Sha256};
    let read = |ending: &str| std::fs::read(at.join(format!("{}.{ending}", program.name)));
    let text =
        |ending: &str| String::from_utf8(read(ending).unwrap_or_default()).unwrap_or_default();
    // What prints the whole answer printed its head too.
    let got = read("out")
        .or_else(|_| read("out.head"))
        .unwrap_or_default();
    let body = &got[got.len().saturating_sub(BYTES as usize)..];
    let ended: Vec<f64> = text("ended")
        .split_whitespace()
        .filter_map(|w| w.parse().ok())
        .collect();
    let (code, took_s) = match ended[..] {
        [code, begun, ended] => (Some(code), Some(ended - begun)),
        _ => (None, None),
    };
    let errors = text("errors");
    let rung = errors
        .lines()
        .find_map(|line| line.strip_prefix("cedos run: "));
    let rung = rung.and_then(|line| line.split([':', ',']).next());
    let same = Sha256::digest(body).as_slice() == wanted;
    json!({
        "rung": rung,
        "whole": code == Some(0.0) && same,
        "took_s": took_s,
    })
}

/// Seconds that curl takes directly, and by `cedos run`, on a link where nothing happens.
fn timed(at: &Path) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    let cedos = this_program()?;
    let shown = at.display();
    let fetch = format!(
        "curl -sS -o /dev/null -w '%{{time_total}}\\n' $CEDOS_LAB_ORIGIN/bytes/{TIMED_BYTES}"
    );
    let mut text = String::from("export CEDOS_PROX=\"$CEDOS_LAB_PROX\"\n");
    for _ in 0..TIMED {
        writeln!(text, "{fetch} >>{shown}/direct")?;
        writeln!(
            text,
            "{cedos} run -- {fetch} >>{shown}/through 2>>{shown}/through.errors"
        )?;
    }
    command_in_lab(QUIET, &text)?;
    let times = |name: &str| -> anyhow::Result<Vec<f64>> {
        let text = std::fs::read_to_string(at.join(name)).context("curl told no time")?;
        Ok(text
            .lines()
            .filter_map(|line| line.trim().parse().ok())
            .collect())
    };
    let (direct, through) = (times("direct")?, times("through")?);
    anyhow::ensure!(
        direct.len() == TIMED && through.len() == TIMED,
        "curl told {} and {} times of {TIMED}",
        direct.len(),
        through.len()
    );
    Ok((direct, through))
}
