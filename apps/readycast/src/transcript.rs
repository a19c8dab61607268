//! Transcripts of episodes (`podcast:transcript`): WebVTT, SubRip, JSON, HTML and plain text, read into passages of plain
//! text with the times at which they are spoken.
//!
//! ```text
//!  bytes ─▶ which form? ─▶ cues: time, speaker, text ─▶ passages: cues of one speaker, to the end of a sentence
//! ```
//!
//! A transcript is written by a stranger. Nothing of its markup is kept, and everything has a limit.

use cedos_sandbox::confined;
use serde::{Deserialize, Serialize};

use crate::feed::{markup_lines, plain_text};

/// The maximum number of bytes of a transcript.
pub const TRANSCRIPT_BYTES_MAX: usize = 8 << 20; // a guess: three hours in JSON by the word are 4 MB

/// The maximum number of passages of a transcript.
pub const PASSAGES_MAX: usize = 5_000; // a guess: ten hours have 3,000

/// Bytes of a passage after which it ends with its sentence.
const SENTENCE_AFTER_BYTES: usize = 160; // a guess: what a person reads at a glance

/// The maximum number of bytes of a passage.
const PASSAGE_BYTES_MAX: usize = 600; // a guess: half a minute of speech

/// The maximum number of bytes of a speaker's name.
const SPEAKER_BYTES_MAX: usize = 100; // a guess

/// The latest time of a passage, in seconds: four days.
const START_S_MAX: f64 = 4.0 * 24.0 * 3_600.0; // a guess

/// A passage of a transcript, in plain text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TranscriptPassage {
    /// The start of the passage, in seconds; none if the transcript has no time for it.
    pub start_s: Option<f64>,
    /// Who speaks; empty if that is not known, or as before.
    pub speaker: String,
    /// The words of the passage, never empty.
    pub text: String,
}

/// Reads a transcript of any form that can be shown, on a thread that reaches nothing else; none if it is none.
pub fn parse_transcript(bytes: &[u8]) -> Option<Vec<TranscriptPassage>> {
    if bytes.len() > TRANSCRIPT_BYTES_MAX {
        return None;
    }
    let cues = confined(|| cues_of(&String::from_utf8_lossy(bytes)));
    let passages = passages(cues);
    (!passages.is_empty()).then_some(passages)
}

/// A piece of a transcript as its file has it: a word or a line.
#[derive(Debug, Default, PartialEq)]
struct TranscriptCue {
    start_s: Option<f64>,
    speaker: String,
    text: String,
}

/// A transcript in JSON, as the podcast namespace defines it.
#[derive(Deserialize)]
struct JsonTranscript {
    segments: Vec<JsonSegment>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct JsonSegment {
    #[serde(default)]
    speaker: String,
    start_time: Option<f64>,
    #[serde(default)]
    body: String,
}

fn cues_of(text: &str) -> Vec<TranscriptCue> {
    let text = text.trim_start_matches('\u{feff}').trim_start();
    if text.starts_with('{') {
        return json_cues(text);
    }
    if text.starts_with("WEBVTT") || text.contains(" --> ") {
        return timed_cues(text);
    }
    let lines = match text.starts_with('<') {
        true => markup_lines(text),
        false => text.lines().map(str::to_owned).collect(),
    };
    line_cues(&lines)
}

fn json_cues(text: &str) -> Vec<TranscriptCue> {
    let Ok(file) = serde_json::from_str::<JsonTranscript>(text) else {
        return Vec::new();
    };
    let cues = file.segments.into_iter().map(|segment| TranscriptCue {
        start_s: segment.start_time,
        speaker: segment.speaker,
        text: segment.body,
    });
    cues.collect()
}

/// Cues of WebVTT and SubRip: blocks with a line of times. Blocks without one are comments, styles and headers.
fn timed_cues(text: &str) -> Vec<TranscriptCue> {
    let mut cues = Vec::new();
    let mut cue: Option<TranscriptCue> = None;
    for line in text.lines().map(str::trim) {
        if let Some((start, _)) = line.split_once("-->") {
            cues.extend(cue.take());
            cue = Some(TranscriptCue {
                start_s: clock_seconds(start),
                ..TranscriptCue::default()
            });
        } else if line.is_empty() {
            cues.extend(cue.take());
        } else if let Some(cue) = &mut cue {
            let line = match voice(line) {
                Some((speaker, rest)) => {
                    speaker.clone_into(&mut cue.speaker);
                    rest
                }
                None => line,
            };
            cue.text.push_str(line);
            cue.text.push(' ');
        }
    }
    cues.extend(cue);
    cues
}

/// Who speaks a line, and what: `<v Ada>…` of WebVTT, `Ada: …` of SubRip.
fn voice(line: &str) -> Option<(&str, &str)> {
    if let Some(rest) = line.strip_prefix("<v") {
        let (name, rest) = rest.split_once('>')?;
        let name = name.split_once(char::is_whitespace);
        return name.map(|(_, name)| (name.trim(), rest));
    }
    let (name, rest) = line.split_once(": ")?;
    let words = name.split_whitespace().count();
    let is_name = (1..=3).contains(&words)
        && name
            .chars()
            .all(|c| c.is_alphanumeric() || " .'-".contains(c));
    let is_proper = name.starts_with(char::is_uppercase);
    (is_name && is_proper).then_some((name, rest))
}

/// Cues of text and HTML: lines, after a line that is a time or the name of a speaker.
fn line_cues(lines: &[String]) -> Vec<TranscriptCue> {
    let mut cues = Vec::new();
    let mut next = TranscriptCue::default();
    for line in lines
        .iter()
        .map(|line| line.trim())
        .filter(|line| !line.is_empty())
    {
        // `Ada: 0:12` and `0:12` are about what follows.
        let (speaker, time) = match line.split_once(':') {
            Some((name, rest)) if clock_seconds(line).is_none() => (Some(name), rest.trim()),
            _ => (None, line),
        };
        let start = clock_seconds(time);
        match (speaker, start) {
            (Some(name), _) if start.is_some() || time.is_empty() => {
                name.clone_into(&mut next.speaker);
                next.start_s = start.or(next.start_s);
            }
            (None, Some(start)) => next.start_s = Some(start),
            _ => {
                let (name, text) = voice(line).unwrap_or(("", line));
                if next.speaker.is_empty() {
                    name.clone_into(&mut next.speaker);
                }
                next.text = text.to_owned();
                cues.push(std::mem::take(&mut next));
            }
        }
    }
    cues
}

/// Seconds of `1:02:03.5`, `02:03,500` or `2:03`.
fn clock_seconds(text: &str) -> Option<f64> {
    let text = text.trim().replace(',', ".");
    let parts = text.split(':').count();
    if !(2..=3).contains(&parts) {
        return None;
    }
    text.split(':').try_fold(0.0, |sum, part| {
        let is_number = part
            .bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b'.');
        let number: f64 = part.parse().ok().filter(|_| is_number)?;
        Some(sum * 60.0 + number)
    })
}

/// Puts cues together to what a person reads as one.
fn passages(cues: Vec<TranscriptCue>) -> Vec<TranscriptPassage> {
    let mut passages: Vec<TranscriptPassage> = Vec::new();
    let mut speaking = String::new();
    for cue in cues {
        let text = plain_text(&cue.text, PASSAGE_BYTES_MAX);
        if text.is_empty() {
            continue;
        }
        let speaker = plain_text(&cue.speaker, SPEAKER_BYTES_MAX);
        let is_other = !speaker.is_empty() && speaker != speaking;
        let start_s = cue.start_s.filter(|s| (0.0..=START_S_MAX).contains(s));
        let open = passages.last_mut().filter(|last| {
            let is_at_end = last.text.ends_with(['.', '?', '!', '…', '。']);
            let is_complete = last.text.len() >= SENTENCE_AFTER_BYTES && is_at_end;
            let has_room = last.text.len() + text.len() < PASSAGE_BYTES_MAX;
            let is_as_timed = start_s.is_some() == last.start_s.is_some();
            !is_other && !is_complete && has_room && is_as_timed
        });
        match open {
            // A line without a time is a paragraph of its own.
            Some(last) if start_s.is_some() => {
                last.text.push(' ');
                last.text.push_str(&text);
            }
            _ => {
                if passages.len() == PASSAGES_MAX {
                    break;
                }
                let start_s = start_s.map(|s| (s * 1000.0).round() / 1000.0);
                if is_other {
                    speaking.clone_from(&speaker);
                }
                let speaker = if is_other { speaker } else { String::new() };
                passages.push(TranscriptPassage {
                    start_s,
                    speaker,
                    text,
                });
            }
        }
    }
    passages
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<(Option<f64>, String, String)> {
        let passages = parse_transcript(text.as_bytes()).expect("a transcript");
        let passages = passages.into_iter();
        passages.map(|p| (p.start_s, p.speaker, p.text)).collect()
    }

    fn passage(start_s: f64, speaker: &str, text: &str) -> (Option<f64>, String, String) {
        (Some(start_s), speaker.to_owned(), text.to_owned())
    }

    #[test]
    fn each_form_of_a_transcript_has_its_times_and_speakers() {
        let expected = [
            passage(0.5, "Ada", "Good morning. The ferry is late."),
            passage(61.25, "Jonas", "Is it?"),
        ];
        let vtt = "WEBVTT\n\nNOTE made by hand\n\nSTYLE\n::cue { color: red }\n\n1\n00:00.500 --> 00:02.000 align:start\n\
                   <v Ada>Good morning.</v>\n\n00:02.000 --> 00:04.000\n<v.loud Ada>The <b>ferry</b> is late.\n\n\
                   01:01.250 --> 01:02.000\n<v Jonas>Is it?\n";
        assert_eq!(read(vtt), expected);
        let srt = "\u{feff}1\r\n00:00:00,500 --> 00:00:02,000\r\nAda: Good morning.\r\n\r\n2\r\n\
                   00:00:02,000 --> 00:00:04,000\r\nThe ferry\r\nis late.\r\n\r\n3\r\n\
                   00:01:01,250 --> 00:01:02,000\r\nJonas: Is it?\r\n";
        assert_eq!(read(srt), expected);
        let json = r#"{"version": "1.0.0", "segments": [
            {"speaker": "Ada", "startTime": 0.5, "endTime": 1, "body": "Good"},
            {"speaker": "Ada", "startTime": 1, "endTime": 2, "body": "morning."},
            {"startTime": 2, "endTime": 4, "body": "The ferry is late."},
            {"speaker": "Jonas", "startTime": 61.25, "body": "Is it?"}]}"#;
        assert_eq!(read(json), expected);
        let html = "<cite>Ada:</cite><time>0:00.5</time><p>Good morning. The <i>ferry</i> is late.</p>\
                    <cite>Jonas:</cite> <time>1:01.25</time><p>Is it?</p>";
        assert_eq!(read(html), expected);
        let text = "Ada: 0:00.5\nGood morning. The ferry is late.\n\nJonas:\n1:01.25\nIs it?";
        assert_eq!(read(text), expected);
    }

    #[test]
    fn text_without_times_is_read_by_its_lines() {
        let none = |text: &str| (None, String::new(), text.to_owned());
        assert_eq!(
            read("One line.\n\nAnother: this one is about water.\n"),
            [
                none("One line."),
                (
                    None,
                    "Another".to_owned(),
                    "this one is about water.".to_owned()
                )
            ]
        );
    }

    #[test]
    fn nothing_of_the_markup_of_a_transcript_is_left() {
        let hostile = "WEBVTT\n\n00:00.000 --> 00:01.000\n<script>alert(1)</script><img src=x onerror=alert(1)>a\u{202e}b &lt;i&gt;\n";
        let passages = read(hostile);
        assert_eq!(passages, [passage(0.0, "", "a b <i>")]);
        let html = "<script>alert(1)</script><style>p{}</style><p onclick=x>Hello.</p>";
        assert_eq!(read(html), [(None, String::new(), "Hello.".to_owned())]);
    }

    #[test]
    fn what_is_no_transcript_is_none_and_a_long_one_has_an_end() {
        for wrong in [
            "",
            "{}",
            "{\"segments\": []}",
            "WEBVTT\n",
            "<p></p>",
            "{\"segments\": [{}]}",
        ] {
            assert_eq!(parse_transcript(wrong.as_bytes()), None, "{wrong}");
        }
        let long = "x".repeat(300);
        let cues =
            (0..20_000).map(|n| format!("{}:{:02}.0 --> 0:0.0\n{long}.\n\n", n / 60, n % 60));
        let cues = format!("WEBVTT\n\n{}", cues.collect::<String>());
        let passages = read(&cues);
        assert_eq!(passages.len(), PASSAGES_MAX);
        assert!(passages.iter().all(|p| p.2.len() <= 2 * PASSAGE_BYTES_MAX));
        let late = "WEBVTT\n\n999999:00:00.000 --> 1:00.0\nlate\n\n-1:00 --> 1:0\nearly\n";
        assert!(read(late).iter().all(|p| p.0.is_none()));
    }
}
