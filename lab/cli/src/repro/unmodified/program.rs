//! The programs, their calls, and how it is checked that the result is that of an undisturbed run.
//!
//! In a call `$RUN` is `cedos run --`, `$OUT` the program's own output file, `$AT` the folder;
//! `$URL` and `$HOST` are the lab's own web server, `$WEB` nginx.

use super::site::{
    CLIP_MAKE, CLIP_S, FILE_BYTES, GIT_MAKE, OBJECT_BYTES, OBJECTS, ProgramFolder, SEED, SSH_MAKE,
    page_sum,
};
use cedos_lab_scenario::content;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// The bytes that each program fetches which fetches alone: together more than the links carry
/// before the outage.
pub const BYTES: u64 = 2_500_000;

/// An unmodified program.
pub struct Program {
    pub name: &'static str,
    /// The programs that must be installed.
    needs: &'static [&'static str],
    /// The commands that create its files.
    makes: &'static [&'static str],
    pub call: &'static str,
    /// The command that writes its result into `$OUT`, if it does not do so itself.
    pub after: &'static str,
    result: ProgramOutcome,
}

/// The expected result of a program.
enum ProgramOutcome {
    /// This many bytes at the end of its output.
    Bytes(u64),
    /// Each key's echo, in order.
    Echoes,
    /// Every object of a page, and a film to its end.
    Page,
    /// A film to its end.
    Played,
    /// Every packet of a film.
    Packets,
}

const fn fetches(
    name: &'static str,
    needs: &'static [&'static str],
    makes: &'static [&'static str],
    call: &'static str,
) -> Program {
    Program {
        name,
        needs,
        makes,
        call,
        after: "",
        result: ProgramOutcome::Bytes(BYTES),
    }
}

/// Programs that fetch from the lab's own web server.
pub const CAUGHT: &[Program] = &[
    fetches("curl", &["curl"], &[], "$RUN curl -sS -o $OUT $URL"),
    // It would repair a broken connection by itself.
    fetches(
        "wget",
        &["wget"],
        &[],
        "$RUN wget -q --tries=1 -O $OUT $URL",
    ),
    fetches(
        "python",
        &["python3"],
        &[],
        "$RUN python3 -c 'import sys,shutil,urllib.request as r; \
         r.install_opener(r.build_opener(r.ProxyHandler({}))); \
         shutil.copyfileobj(r.urlopen(sys.argv[1]), open(sys.argv[2], \"wb\"))' $URL $OUT",
    ),
    fetches(
        "requests",
        &["python3"],
        &["python3 -c 'import requests'"],
        "$RUN python3 -c 'import sys,shutil,requests; \
         shutil.copyfileobj(requests.get(sys.argv[1], stream=True).raw, open(sys.argv[2], \"wb\"))' $URL $OUT",
    ),
    // Unencoded bytes, with its own HTTP client.
    fetches(
        "ffmpeg",
        &["ffmpeg"],
        &[],
        "$RUN ffmpeg -v error -y -f data -i $URL -map 0 -c copy -f data $OUT",
    ),
    // Its own timeout is 60 s: it may request again.
    fetches(
        "aria2",
        &["aria2c"],
        &[],
        "$RUN sh -c 'exec aria2c -q -d \"${1%/*}\" -o \"${1##*/}\" \"$0\"' $URL $OUT",
    ),
    fetches(
        "jvm",
        &["java", "javac"],
        &["javac -d $AT $AT/Fetch.java"],
        "$RUN java -cp $AT Fetch $URL $OUT",
    ),
    fetches(
        "go",
        &["go"],
        &["CGO_ENABLED=0 go build -o $AT/fetch-go $AT/fetch.go"],
        "$RUN $AT/fetch-go $URL >$OUT",
    ),
    fetches(
        "static-c",
        &["cc"],
        &["cc -static -o $AT/fetch-static $AT/fetch.c"],
        "$RUN $AT/fetch-static wait $HOST 80 /bytes/$BYTES >$OUT",
    ),
    fetches(
        "static-rust",
        &["rustc"],
        &[
            "rustc --edition 2021 -O --target x86_64-unknown-linux-musl -o $AT/fetch-rust $AT/fetch.rs",
        ],
        "$RUN $AT/fetch-rust $HOST 80 /bytes/$BYTES >$OUT",
    ),
];

/// Programs and servers, neither of which supports D2TP.
pub const SERVED: &[Program] = &[
    Program {
        name: "nginx",
        needs: &["nginx", "curl"],
        makes: &[],
        // The address is the one that `cedos run --listen` printed for the server.
        call: "$CEDOS run --to $(sed -n 's/.*:8081 is //p' $AT/front) -- curl -sS -o $OUT http://nginx.test/file",
        after: "",
        result: ProgramOutcome::Bytes(FILE_BYTES),
    },
    Program {
        name: "git",
        needs: &["git", "nginx"],
        makes: &[GIT_MAKE],
        call: "$RUN git clone -q $WEB/repo.git $AT/clone",
        after: "cp $AT/clone/file $OUT",
        result: ProgramOutcome::Bytes(FILE_BYTES),
    },
    Program {
        name: "rsync",
        needs: &["rsync", "ssh", "sshd", "root"],
        makes: &[SSH_MAKE],
        call: "$RUN rsync -a -e 'ssh -F $AT/ssh_config' lab:$AT/www/tree/ $AT/tree/",
        after: "cat $AT/tree/? >$OUT",
        result: ProgramOutcome::Bytes(FILE_BYTES),
    },
    Program {
        name: "ssh",
        needs: &["ssh", "sshd", "root", "python3"],
        makes: &[SSH_MAKE],
        call: "python3 $AT/keys.py $OUT 380 0.25 0 -- \
               $RUN ssh -F $AT/ssh_config -tt lab 'stty raw -echo; echo ready; exec dd bs=1 count=381 status=none'",
        after: "",
        result: ProgramOutcome::Echoes,
    },
];

/// Programs that display something.
pub const SHOWN: &[Program] = &[
    Program {
        name: "chromium",
        needs: &["chromium", "nginx", "ffmpeg"],
        makes: &[CLIP_MAKE],
        call: "$RUN sh $AT/browse.sh chromium chromium none \"$WEB/page.html?who=chromium&$PAGE\"",
        after: "",
        result: ProgramOutcome::Page,
    },
    Program {
        name: "firefox",
        needs: &["firefox-esr", "nginx", "ffmpeg"],
        makes: &[CLIP_MAKE],
        call: "$RUN sh $AT/browse.sh firefox firefox none \"$WEB/page.html?who=firefox&$PAGE\"",
        after: "",
        result: ProgramOutcome::Page,
    },
    Program {
        name: "mpv",
        needs: &["mpv", "nginx", "ffmpeg"],
        makes: &[CLIP_MAKE],
        call: "env OUT=$OUT $RUN mpv --no-config --really-quiet --vo=null --ao=null --script=$AT/played.lua \
               $WEB/clip.webm?mpv",
        after: "",
        result: ProgramOutcome::Played,
    },
    Program {
        name: "vlc",
        // It refuses to run as root, and `preload` answers no other user's process.
        needs: &["vlc", "setpriv", "ffprobe", "nginx", "ffmpeg", "root"],
        makes: &[
            CLIP_MAKE,
            "chmod 711 $AT && mkdir -p $AT/vlc && chown 65534:65534 $AT/vlc",
        ],
        // Played in real time, and also written to a file.
        call: "env HOME=$AT/vlc XDG_RUNTIME_DIR=$AT/vlc \
               $CEDOS run --rung tun -- setpriv --reuid 65534 --regid 65534 --clear-groups \
               vlc -I dummy --play-and-exit --vout dummy --aout dummy \
               --sout '#duplicate{dst=display,dst=std{access=file,mux=avformat{mux=matroska},dst=-}}' \
               $WEB/clip.webm?vlc >$AT/vlc.mkv",
        after: "for file in www/clip.webm vlc.mkv; do for kind in v a; do \
                ffprobe -v error -select_streams $kind -show_entries packet=data_hash -show_data_hash adler32 \
                -of csv=p=0 $AT/$file >$AT/${file##*/}.$kind; done; done",
        result: ProgramOutcome::Packets,
    },
];

impl Program {
    /// Creates the files that the program needs.
    ///
    /// # Errors
    /// What is missing.
    pub fn make(&self, site: &ProgramFolder) -> Result<(), String> {
        site.make(self.needs, self.makes)
            .map_err(|why| format!("{}: {why}", self.name))
    }

    /// The command line with all variables replaced.
    pub fn filled(&self, text: &str, site: &ProgramFolder) -> String {
        let page = format!("objects={OBJECTS}&first=20&every=1000&video=1");
        let text = text
            .replace("$PAGE", &page)
            .replace("$WEB", "http://$ORIGIN:8081")
            .replace("$HOST", "${CEDOS_LAB_ORIGIN#http://}")
            .replace("$URL", "$CEDOS_LAB_ORIGIN/bytes/$BYTES")
            .replace("$BYTES", &BYTES.to_string());
        site.filled(&text, self.name)
    }

    /// Whether its result is that of an undisturbed run, and further figures.
    pub fn result(&self, site: &ProgramFolder) -> (bool, Value) {
        let out = format!("{}.out", self.name);
        match self.result {
            ProgramOutcome::Bytes(bytes) => {
                let got = site.read(&out);
                // A program that prints the whole answer has printed its head, too.
                let body = &got[got.len().saturating_sub(bytes as usize)..];
                let wanted = content::sha256(SEED, bytes);
                (Sha256::digest(body).as_slice() == wanted, Value::Null)
            }
            ProgramOutcome::Echoes => {
                let told: Value = serde_json::from_str(&site.text(&out)).unwrap_or(Value::Null);
                let right = told["echoed"].is_u64()
                    && told["echoed"] == told["typed"]
                    && told["wrong"] == 0;
                let longest = told["ms"].as_array().into_iter().flatten();
                let longest = longest.filter_map(Value::as_f64).fold(0.0, f64::max);
                (
                    right,
                    json!({ "keys": told["echoed"], "longest_echo_s": longest / 1000.0 }),
                )
            }
            ProgramOutcome::Page => {
                let said = report_of(&site.text("reports"), self.name);
                let figure = |name: &str| -> Option<f64> { said.get(name)?.parse().ok() };
                let right = figure("sum") == Some(f64::from(page_sum(OBJECTS)))
                    && figure("bytes") == Some((OBJECTS * OBJECT_BYTES) as f64)
                    && figure("ended") == Some(1.0)
                    && figure("at").is_some_and(is_the_end);
                (
                    right,
                    json!({ "frames": figure("frames"), "silent_s": figure("silent_s"), "failed": said.get("failed") }),
                )
            }
            ProgramOutcome::Played => {
                let said = site.text(&out);
                let at = said.trim().strip_prefix("eof ");
                let at = at.and_then(|at| at.parse().ok());
                (at.is_some_and(is_the_end), json!({ "played_s": at }))
            }
            ProgramOutcome::Packets => {
                let errors = site.text(&format!("{}.errors", self.name));
                let stalls = errors.matches(STALLED).count();
                let missing = |kind: &str| {
                    let (film, wrote) = ("clip.webm", format!("{}.mkv", self.name));
                    let packets = |file: &str| site.text(&format!("{file}.{kind}"));
                    left_out(&packets(film), &packets(&wrote))
                };
                let few = |missing: Option<usize>, at_the_end: usize, each: usize| {
                    missing.is_some_and(|n| n <= at_the_end + stalls * each)
                };
                let (film, sound) = (missing("v"), missing("a"));
                let right = few(film, UNWRITTEN_FRAMES, STALLED_FRAMES)
                    && few(sound, UNWRITTEN_SOUNDS, STALLED_SOUNDS);
                (
                    right,
                    json!({ "frames_missing": film, "sounds_missing": sound, "stalls": stalls }),
                )
            }
        }
    }
}

/// The message of VLC each time that its buffer was empty and is filled again.
const STALLED: &str = "is called too late";
/// Frames that it plays and does not write: at the film's end, and after each stall. // measured
/// over TCP: docs/repro/C11.md
const UNWRITTEN_FRAMES: usize = 1;
const UNWRITTEN_SOUNDS: usize = 4;
const STALLED_FRAMES: usize = 2;
const STALLED_SOUNDS: usize = 1;

/// The number of packets of `film` that are missing in `wrote`; `None` if that contains other
/// packets, or another order, or nothing.
fn left_out(film: &str, wrote: &str) -> Option<usize> {
    let hashes = |text| str::lines(text).filter_map(|line| Some(line.split_once("adler32:")?.1));
    let (mut left, mut found) = (hashes(film), 0);
    for packet in hashes(wrote) {
        left.find(|other| *other == packet)?;
        found += 1;
    }
    (found > 0).then(|| hashes(film).count() - found)
}

/// Whether the time is the film's end, within half a second: it is the last frame's time.
fn is_the_end(at_s: f64) -> bool {
    (f64::from(CLIP_S) - at_s).abs() <= 0.5
}

/// The last report of a page: names and values.
pub fn report_of(reports: &str, who: &str) -> std::collections::BTreeMap<String, String> {
    let of = format!("who={who}&");
    let last = reports.lines().rfind(|line| line.contains(&of));
    let pairs = last.unwrap_or_default().split('&');
    let pair = |text: &str| {
        text.split_once('=')
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
    };
    pairs.filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::left_out;

    #[test]
    fn packets_may_be_left_out_and_no_other_may_come_between() {
        let film = "adler32:aa\nadler32:bb\nadler32:cc\n\n,adler32:dd\n";
        assert_eq!(left_out(film, film), Some(0));
        assert_eq!(left_out(film, "adler32:aa\nadler32:cc\n"), Some(2));
        assert_eq!(left_out(film, "adler32:cc\nadler32:aa\n"), None);
        assert_eq!(left_out(film, "adler32:aa\nadler32:ee\n"), None);
        assert_eq!(left_out(film, ""), None);
    }
}
