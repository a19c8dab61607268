//! What differs between two runs of the same command is replaced by an example of it: times, durations,
//! chances, addresses and keys.

/// Text with names replaced: paths, addresses and keys.
pub fn renamed(text: &str, names: &[(String, &str)]) -> String {
    let replace = |text: String, (from, to): &(String, &str)| text.replace(from, to);
    names.iter().fold(text.to_owned(), replace)
}

/// Lines in which the numbers that differ between runs are replaced. Each line ends with a line break.
pub fn normalised(text: &str) -> String {
    let lines = text.lines().filter(|line| !is_for_operators(line));
    let mut text = String::with_capacity(text.len());
    let mut before = "";
    let mut demonstration = DemonstrationTimes::default();
    for line in lines {
        if let Some(line) = demonstration.normalised(line) {
            text += &(line + "\n");
            continue;
        }
        if !depends_on_handshake(before, line) {
            text += &(normalised_line(line) + "\n");
        }
        before = line;
    }
    text
}

/// The lines of the demonstration. What happens to its links has set times, and the download's lines get those.
#[derive(Default)]
struct DemonstrationTimes {
    last: Option<f64>,
}

impl DemonstrationTimes {
    /// The line as each run has it; none if the line is not the demonstration's.
    fn normalised(&mut self, line: &str) -> Option<String> {
        let of_table = [
            (
                "finished                 complete",
                "finished                 complete at 12.0 s    complete at 14.0 s",
            ),
            (
                "fetched again ",
                "fetched again            0.0 MB                9.0 MB",
            ),
            (
                "1 handover, 1 new address, ",
                "1 handover, 1 new address, 2.0 s without a network",
            ),
            (
                "without data at a handover: ",
                "without data at a handover: 30 ms (median), 4.0 s (longest)",
            ),
        ];
        if let Some((_, shown)) = of_table.iter().find(|(begin, _)| line.starts_with(begin)) {
            return Some((*shown).to_owned());
        }
        let (time, rest) = line.trim_start().split_once(" s  ")?;
        let time: f64 = time.parse().ok()?;
        if !rest.starts_with("D2TP") {
            self.last = Some(time.floor());
        }
        let shown = format!("{:6.2} s  {rest}", self.last.unwrap_or(0.0));
        if let Some((before, silence)) = shown.split_once(" again after ")
            && let Some((_, after)) = silence.split_once(" s, ")
        {
            return Some(format!("{before} again after 4.0 s, {after}"));
        }
        let (before, after) = match shown.split_once(" s left") {
            Some((before, _)) => (
                before.trim_end_matches(|c: char| c.is_ascii_digit()),
                "55 s left",
            ),
            None => (&*shown, ""),
        };
        Some(format!("{before}{after}"))
    }
}

/// Whether a line is there if the handshake with the proxy had begun when the program was interrupted.
fn depends_on_handshake(before: &str, line: &str) -> bool {
    before == "nothing requested yet" && line.starts_with("Carried by: ")
}

/// Whether a line is the proxy's log of what it did for a client: the page is about messages.
fn is_for_operators(line: &str) -> bool {
    let modules = ["cedos_prox::flow_report", "d2tp_driver::refused_clients"];
    modules.iter().any(|module| line.contains(module))
}

fn normalised_line(line: &str) -> String {
    // A log begins with the time; the link for a player has a port and a token.
    if let Some((time, rest)) = line.split_once("Z ")
        && time.len() >= 19
        && time.as_bytes()[10] == b'T'
    {
        return format!("2030-01-31T18:00:00Z {}", without_numbers(rest));
    }
    if let Some(path) = line.strip_prefix("http://127.0.0.1:") {
        let file = path.rsplit('/').next().unwrap_or_default();
        return format!("http://127.0.0.1:40123/TOKEN/{file}");
    }
    // Whether a chance is that high differs between runs, too.
    let line = line.replace("over 99 %", "99 %");
    let line = line.replace("under 1 %", "1 %");
    let line = line.replace(" MB kept", " kB kept");
    without_numbers(&without_day(&line))
}

/// The words before a time of day that differs between runs.
const BEFORE_TIME: [&str; 6] = [
    "Deadline: ",
    "Deadline  ",
    "by ",
    "at ",
    "until ",
    "2030-01-31 ",
];

/// A line without the day before a time of day, which is there or not by the hour of the run:
/// `Deadline: Thu 26 Nov 00:25`.
fn without_day(line: &str) -> String {
    let mut words: Vec<&str> = line.split(' ').collect();
    let mut at = 0;
    while at + 3 < words.len() {
        let is_day = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"].contains(&words[at])
            && words[at + 1].parse::<u8>().is_ok();
        let years = usize::from(words[at + 3].len() == 4 && words[at + 3].parse::<u16>().is_ok());
        let time = words.get(at + 3 + years);
        let before = words[..at].join(" ") + " ";
        if is_day
            && BEFORE_TIME.iter().any(|word| before.ends_with(word))
            && time.is_some_and(|time| time.as_bytes().get(2) == Some(&b':'))
        {
            words.drain(at..at + 3 + years);
        }
        at += 1;
    }
    words.join(" ")
}

fn without_numbers(line: &str) -> String {
    let mut out = String::new();
    let mut rest = line;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let (before, from) = rest.split_at(start);
        out += before;
        let (replaced, length) = replaced_number(&out, from);
        out += &replaced;
        rest = &from[length..];
    }
    out + rest
}

/// Whether text begins with a date: `2030-01-31`.
fn is_date(text: &str) -> bool {
    let date = text.get(..10).unwrap_or_default().as_bytes();
    let is_right = |(at, byte): (usize, &u8)| match at {
        4 | 7 => *byte == b'-',
        _ => byte.is_ascii_digit(),
    };
    date.len() == 10 && date.iter().enumerate().all(is_right)
}

fn digits(text: &str) -> usize {
    text.bytes().take_while(u8::is_ascii_digit).count()
}

/// What replaces the number with which `from` begins, and how many bytes of `from` it replaces. `before`: the
/// line so far.
fn replaced_number(before: &str, from: &str) -> (String, usize) {
    let whole = digits(from);
    let fraction = from[whole..].strip_prefix('.').map_or(0, digits);
    let end = whole + if fraction > 0 { fraction + 1 } else { 0 };
    let after = &from[end..];
    let example = |text: &str, length: usize| (text.to_owned(), length);
    let follows = |words: &[&str]| words.iter().any(|word| before.ends_with(word));
    if is_date(from) && follows(&["since ", "until ", "enrolled ", "last seen "]) {
        return example("2030-01-31", 10);
    }
    if follows(&["expires_s="]) {
        return example("1900000000", end);
    }
    // A deadline of six hours, a moment later.
    if from.starts_with("5 h 59 min)") && follows(&["(in "]) {
        return example("6 hours", "5 h 59 min".len());
    }
    let minutes = from[whole..].strip_prefix(':').map_or(0, digits);
    if minutes == 2 && follows(&BEFORE_TIME) {
        let length = whole + 3;
        let seconds = from[length..].strip_prefix(':').map_or(0, digits);
        return example("18:00", length + if seconds == 2 { 3 } else { 0 });
    }
    let is_unit = |unit: &&str| after.starts_with(*unit);
    if [" ms", " s left", " B/s", " kB/s", " MB/s", " GB/s"]
        .iter()
        .any(is_unit)
    {
        return example("5", end);
    }
    // What a client has transferred, with the names of this machine in its requests.
    if [" B down", " B up"].iter().any(is_unit) {
        return example("200", end);
    }
    // What each of several networks carried, and what a forecast says, depends on the machine's speed.
    let is_amount = [" kB", " MB"].iter().any(is_unit);
    let is_split =
        before.contains("(wlan0 ") && (from.contains("mobile data ") || follows(&["mobile data "]));
    if is_split && is_amount && follows(&["wlan0 ", "wwan0 ", "mobile data "]) {
        return example("4.00 MB", end + " MB".len());
    }
    // A few packets come twice.
    if after.starts_with(" MB") && follows(&["(wlan0 ", "(wwan0 ", "mobile data "]) {
        return (format!("{}.00", &from[..whole]), end);
    }
    let is_varying = [" kB expected", " kB kept", " B so far"];
    if is_varying.iter().any(is_unit) && !from.starts_with("500.00 kB kept") {
        return example("150", end);
    }
    if follows(&["memory_bound="]) {
        return example("1000000000", end);
    }
    if from.starts_with("39 seconds)") && follows(&["(in "]) {
        return example("40", end);
    }
    if after.starts_with(" %") && follows(&["with wwan0 "]) {
        return example("70", end);
    }
    if after.starts_with(" % likely") && follows(&["networks alone "]) {
        return example("21", end);
    }
    if after.starts_with(" % likely") && follows(&["probably be late: "]) {
        return example("2", end);
    }
    if after.starts_with(" % likely") {
        return example("97", end);
    }
    let is_seconds = after.strip_prefix(" s").is_some_and(|rest| {
        let next = rest.chars().next();
        next.is_none_or(|next| !next.is_alphanumeric())
    });
    if is_seconds && follows(&[" in ", "(in ", "for "]) {
        return example("1", end);
    }
    example(&from[..end], end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_between_runs_is_replaced_and_the_rest_is_not() {
        for (said, kept) in [
            (
                "  0 flows, 0 B held; this month 347 B down, 208 B up",
                "  0 flows, 0 B held; this month 200 B down, 200 B up",
            ),
            (
                "Deadline: 21:10 (in 6 hours)",
                "Deadline: 18:00 (in 6 hours)",
            ),
            (
                "Deadline: Thu 26 Nov 00:25 (in 6 hours)",
                "Deadline: 18:00 (in 6 hours)",
            ),
            ("by Thu 1 Jan 2027 00:25, x", "by 18:00, x"),
            ("(Fri 31 Jan 2020 07:30)", "(Fri 31 Jan 2020 07:30)"),
            (
                "enrolled 2026-11-25 19:19, last seen 2026-11-25 19:20",
                "enrolled 2030-01-31 18:00, last seen 2030-01-31 18:00",
            ),
            ("likely by 21:10:07, x", "likely by 18:00, x"),
            (
                "until 2026-11-25 16:18. There",
                "until 2030-01-31 18:00. There",
            ),
            ("18:00 (in 5 h 59 min); x", "18:00 (in 6 hours); x"),
            ("write 07:30, friday 16:00", "write 07:30, friday 16:00"),
            ("a: 12.50 MB in 3 s (lo 3 B)", "a: 12.50 MB in 1 s (lo 3 B)"),
            ("answered in 17 ms", "answered in 5 ms"),
            ("1.35 MB/s on lo", "5 MB/s on lo"),
            ("64 % likely", "97 % likely"),
            ("over 99 % likely", "97 % likely"),
            (
                "(wlan0 310.10 kB, wwan0 4.9 MB, mobile data 4.9 MB)",
                "(wlan0 4.00 MB, wwan0 4.00 MB, mobile data 4.00 MB)",
            ),
            (
                "(wwan0 8.00 MB, mobile data 8.00 MB)",
                "(wwan0 8.00 MB, mobile data 8.00 MB)",
            ),
            (
                "1.00 MB in 1 s (wlan0 1.01 MB)",
                "1.00 MB in 1 s (wlan0 1.00 MB)",
            ),
            (
                "networks alone 0 % likely to be on time, with wwan0 94 %",
                "networks alone 21 % likely to be on time, with wwan0 70 %",
            ),
            ("Stopped (500.00 kB kept)", "Stopped (500.00 kB kept)"),
            (
                "probably be late: under 1 % likely",
                "probably be late: 2 % likely",
            ),
            ("18:00 (in 39 seconds); x", "18:00 (in 40 seconds); x"),
            (
                "145.30 kB expected, 8.00 MB at most",
                "150 kB expected, 8.00 MB at most",
            ),
            ("999.62 kB kept. Run", "150 kB kept. Run"),
            ("(metered), 152 B so far", "(metered), 150 B so far"),
            ("http://host:8080/x 404", "http://host:8080/x 404"),
            ("  7.03 s  wlan0 joining", "  7.00 s  wlan0 joining"),
            (
                "  4.05 s  D2TP: waiting: only wwan0 is up, 57 s left",
                "  0.00 s  D2TP: waiting: only wwan0 is up, 55 s left",
            ),
            (
                "http://127.0.0.1:35631/be034/film.mp4",
                "http://127.0.0.1:40123/TOKEN/film.mp4",
            ),
            (
                "2026-11-25T15:28:13.308537Z  INFO ready",
                "2030-01-31T18:00:00Z  INFO ready",
            ),
        ] {
            assert_eq!(normalised(said), format!("{kept}\n"));
        }
    }
}
