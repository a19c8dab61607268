//! Options of curl, wget and aria2 that `cedos get` and `put` do not have: what is said instead of them.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// The advice for options that users know from other programs, by their spellings.
const TABLE: &[(&[&str], &str)] = &[
    (
        &[
            "-O",
            "--remote-name",
            "--remote-name-all",
            "--output-document",
        ],
        "without -o a download gets the name that the server or the URL gives it (curl's -O); -o FILE names it \
         (wget's -O)",
    ),
    (
        &["-J", "--remote-header-name", "--content-disposition"],
        "the name that the server gives is used anyway; leave it out",
    ),
    (
        &["-C", "--continue-at", "-c", "--continue"],
        "the same command resumes a stopped download; leave it out",
    ),
    (
        &["-L", "--location", "--max-redirect"],
        "redirects are followed anyway; leave it out",
    ),
    (
        &["-P", "--directory-prefix", "--output-dir", "-d", "--dir"],
        "-o DIRECTORY says where downloads go; `cedos put FILE URL` uploads",
    ),
    (
        &["-N", "--timestamping", "-nc", "--no-clobber"],
        "a file is never replaced unless -o names it; --skip-existing leaves out what exists",
    ),
    (
        &["-x", "--proxy", "--preproxy", "--socks5"],
        "--prox d2tp://HOST:PORT/KEY names a proxy of yours; without one of yours, leave it out",
    ),
    (
        &[
            "-k",
            "--insecure",
            "--no-check-certificate",
            "--check-certificate",
        ],
        "certificates are always checked; --ca FILE trusts another authority",
    ),
    (
        &[
            "-u",
            "--http-user",
            "--http-password",
            "--http-passwd",
            "--password",
        ],
        "--user NAME asks for the password; --password-file FILE and --netrc read it",
    ),
    (
        &["-A", "--user-agent", "-e", "--referer"],
        "-H 'Name: value' adds any header field, such as User-Agent, Referer or Cookie",
    ),
    (
        &[
            "-T",
            "--upload-file",
            "-F",
            "--form",
            "--data",
            "--post-data",
            "--post-file",
            "--body-file",
        ],
        "`cedos put FILE URL` uploads, and with --post sends a POST",
    ),
    (
        &["-X", "--request", "--method"],
        "`cedos get` sends GET, `cedos put` sends PUT, and with --post POST; leave it out",
    ),
    (
        &["-I", "--head", "--spider"],
        "--dry-run says how large it is, and what would be done",
    ),
    (
        &[
            "-m",
            "--max-time",
            "--timeout",
            "--connect-timeout",
            "--read-timeout",
        ],
        "--within SPAN --if-late fail ends a download that is late; --stall SPAN drops a silent connection",
    ),
    (
        &["--retry", "--retry-wait", "--waitretry", "--max-tries"],
        "a download tries again by itself; --tries N says how often without new data",
    ),
    (
        &[
            "-Z",
            "--parallel",
            "--parallel-max",
            "-j",
            "--max-concurrent-downloads",
            "--split",
        ],
        "as many URLs are downloaded at the same time as the networks can use; leave it out",
    ),
    (
        &[
            "--max-download-limit",
            "--max-overall-download-limit",
            "--rate",
        ],
        "--limit-rate RATE limits all downloads of the command together",
    ),
    (
        &["--background", "-D", "--daemon"],
        "--detach downloads in the background; `cedos ls` lists what goes on",
    ),
    (
        &["-b"],
        "--detach downloads in the background (wget's -b); -H 'Cookie: NAME=VALUE' sends a cookie (curl's -b)",
    ),
    (
        &["--load-cookies"],
        "--cookie FILE sends the cookies of a file that curl, wget or a browser's add-on wrote",
    ),
    (&["-n"], "--netrc reads the password from ~/.netrc"),
    (
        &["-f", "--fail", "--fail-with-body", "-S", "--show-error"],
        "a download that fails always says why and ends with another exit code than 0; leave it out",
    ),
    (
        &[
            "-q",
            "--quiet",
            "-s",
            "--silent",
            "--no-progress-meter",
            "--show-progress",
            "-#",
            "--progress-bar",
        ],
        "`2> /dev/null` hides progress and messages; the exit code says how it ended",
    ),
    (
        &["-a", "-K", "--config"],
        "-i FILE reads URLs from a file, one a line; `cedos config` has defaults of options",
    ),
    (
        &["-r", "--range", "--recursive", "-p", "--page-requisites"],
        "`cedos get` downloads whole files, each by its URL",
    ),
    (
        &["-g", "--globoff"],
        "brackets and braces in a URL are no patterns; leave it out",
    ),
];

/// The advice for an option of another program.
fn advice(option: &str) -> Option<&'static str> {
    let name = option.split('=').next().unwrap_or(option);
    let found = |wanted: &str| {
        let mut rows = TABLE.iter();
        rows.find(|(spellings, _)| spellings.contains(&wanted))
            .map(|(_, text)| *text)
    };
    // A value may be attached to a letter: `-C-`.
    found(name).or_else(|| {
        let letter = name.char_indices().nth(2).map(|(end, _)| &name[..end]);
        letter.filter(|_| !name.starts_with("--")).and_then(found)
    })
}

/// Adds to an error about an unknown option of `get` or `put` what to do instead, if it is an option of
/// another downloader. `arguments`: the command line.
pub fn explain(error: &mut clap::Error, arguments: &[String]) {
    let is_transfer = matches!(arguments.get(1).map(String::as_str), Some("get" | "put"));
    if !is_transfer {
        return;
    }
    if error.kind() == ErrorKind::ValueValidation {
        return explain_file(error, arguments);
    }
    if error.kind() != ErrorKind::UnknownArgument {
        return;
    }
    let Some(ContextValue::String(unknown)) = error.get(ContextKind::InvalidArg) else {
        return;
    };
    // Of letters that were written together, `-nc`, the error names the first.
    let written = arguments.iter().find(|argument| {
        !argument.starts_with("--") && unknown.len() == 2 && argument.starts_with(unknown.as_str())
    });
    let written = written.unwrap_or(unknown);
    if let Some(text) = advice(written) {
        // What clap finds similar is another option than the one that is meant.
        error.remove(ContextKind::SuggestedArg);
        let tip = ContextValue::StyledStrs(vec![StyledStr::from(text)]);
        error.insert(ContextKind::Suggested, tip);
    }
}

/// Adds to an error about a URL that it is the file of wget's `-O`, if it comes after that.
fn explain_file(error: &mut clap::Error, arguments: &[String]) {
    let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) else {
        return;
    };
    let is_file = |pair: &[String]| {
        ["-O", "--output-document"].contains(&pair[0].as_str()) && pair[1] == *value
    };
    if arguments.windows(2).any(is_file) {
        let tip = StyledStr::from("-o FILE names the file (wget's -O)");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProductVerb;
    use clap::{CommandFactory, Parser};

    #[derive(Debug, Parser)]
    struct TestCommand {
        #[command(subcommand)]
        _verb: ProductVerb,
    }

    fn told(arguments: &[&str]) -> String {
        let arguments: Vec<String> = arguments.iter().map(|&text| text.to_owned()).collect();
        let mut command = TestCommand::command();
        let mut error = command
            .try_get_matches_from_mut(&arguments)
            .expect_err("an unknown option");
        explain(&mut error, &arguments);
        error.to_string()
    }

    #[test]
    fn an_option_of_another_downloader_is_answered_by_the_right_one() {
        let url = "https://h/a";
        for (option, words) in [
            (&["-nc"][..], "--skip-existing"),
            (&["-L"], "redirects are followed anyway"),
            (&["--max-download-limit=2M"], "--limit-rate"),
            (&["-q"], "2> /dev/null"),
            (&["-k"], "--ca FILE"),
            (&["-T", "file"], "`cedos put FILE URL`"),
            (&["-m", "60"], "--within SPAN --if-late fail"),
            (&["-b"], "--detach"),
            (&["-b", "a=b"], "-H 'Cookie"),
            (&["--load-cookies", "a.txt"], "--cookie FILE"),
            (&["-n"], "--netrc"),
            (&["--fail"], "says why"),
            (&["-S"], "says why"),
            (&["-fsSL"], "says why"),
        ] {
            let text = told(&[&["cedos", "get"][..], option, &[url]].concat());
            assert!(text.contains(words), "{option:?}: {text}");
            assert!(!text.contains("similar"), "{text}");
        }
        assert!(!told(&["cedos", "get", "--nonsense", url]).contains("tip: `"));
    }

    #[test]
    fn options_by_which_curl_and_wget_name_and_resume_downloads_are_taken() {
        let url = "https://h/a";
        for option in [&["-O"][..], &["-C", "-"], &["-C-"], &["-OC-"], &["-c"]] {
            let line = [&["cedos", "get"][..], option, &[url]].concat();
            let read = TestCommand::command().try_get_matches_from(&line);
            assert!(read.is_ok(), "{option:?}: {}", read.unwrap_err());
        }
        let file = told(&["cedos", "get", "-O", "a.bin", url]);
        assert!(file.contains("-o FILE names the file"), "{file}");
        let offset = told(&["cedos", "get", "-C", "100", url]);
        assert!(offset.contains("resumes where it stopped"), "{offset}");
        let upload = told(&["cedos", "put", "-C", "-", "a.bin", url]);
        assert!(upload.contains("the same command resumes"), "{upload}");
    }

    #[test]
    fn every_spelling_has_one_answer() {
        let mut seen = std::collections::HashSet::new();
        for spelling in TABLE.iter().flat_map(|(spellings, _)| *spellings) {
            assert!(seen.insert(spelling), "{spelling} stands in two rows");
        }
    }

    #[test]
    fn no_option_of_ours_is_answered_as_another_programs() {
        let mut command = TestCommand::command();
        command.build();
        for verb in ["get", "put"] {
            let verb = command.find_subcommand(verb).expect("a verb");
            // What is hidden is another program's, and taken as such.
            for argument in verb.get_arguments().filter(|one| !one.is_hide_set()) {
                let long = argument.get_long().map(|long| format!("--{long}"));
                let short = argument.get_short().map(|short| format!("-{short}"));
                for spelling in long.into_iter().chain(short) {
                    let is_foreign = TABLE
                        .iter()
                        .any(|(spellings, _)| spellings.contains(&spelling.as_str()));
                    assert!(!is_foreign, "{spelling}");
                }
            }
        }
    }
}
