//! The URLs of `cedos get`: those on the command line, and those in a file (`-i`).

use std::collections::HashSet;
use std::io::Read;
use std::path::Path;

use url::Url;

/// URLs that one command takes at most.
const URLS_MAX: usize = 10_000; // a guess: the queue of an agent has a thousand
/// The most bytes of a file of URLs.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// The URLs to download, each once.
///
/// # Errors
/// The file cannot be read, a line of it is no URL, or there are too many; in words.
pub fn read_urls(named: &[Url], file: Option<&Path>) -> Result<Vec<Url>, String> {
    let mut urls = named.to_vec();
    if let Some(file) = file {
        let (text, name) = read_file(file)?;
        urls.extend(parse_lines(&text, &name)?);
        if urls.is_empty() {
            return Err(format!("{name} has no URL"));
        }
    }
    let mut seen = HashSet::new();
    urls.retain(|url| seen.insert(url.clone()));
    match urls.len() <= URLS_MAX {
        true => Ok(urls),
        false => Err(format!(
            "{} URLs are too many for one command; {URLS_MAX} is the limit",
            urls.len()
        )),
    }
}

/// The text of a file, and its name for people. `-` is standard input.
fn read_file(file: &Path) -> Result<(String, String), String> {
    let (opened, name): (std::io::Result<Box<dyn Read>>, _) = match file == Path::new("-") {
        true => (Ok(Box::new(std::io::stdin())), "standard input".to_owned()),
        false => {
            let opened = std::fs::File::open(file);
            let opened = opened.map(|file| Box::new(file) as Box<dyn Read>);
            (opened, file.display().to_string())
        }
    };
    let mut text = String::new();
    let read = opened.and_then(|input| input.take(FILE_BYTES_MAX + 1).read_to_string(&mut text));
    match read {
        Ok(bytes) if bytes as u64 > FILE_BYTES_MAX => {
            Err(format!("{name} is too large for a list of URLs"))
        }
        Ok(_) => Ok((text, name)),
        Err(error) => Err(format!("cannot read {name}: {error}")),
    }
}

/// A URL for each line. Empty lines, and those that begin with `#`, are left out.
fn parse_lines(text: &str, name: &str) -> Result<Vec<Url>, String> {
    let lines = text.lines().enumerate();
    let lines = lines.map(|(at, line)| (at + 1, line.trim()));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let parse =
        |(number, line)| parse_url(line).map_err(|error| format!("{name}, line {number}: {error}"));
    lines.map(parse).collect()
}

/// Reads a URL of a scheme that can be downloaded.
///
/// # Errors
/// It is none, and what may be meant.
pub fn parse_url(text: &str) -> Result<Url, String> {
    let refuse = |why: &str| {
        let meant = match text.split_once("://") {
            None if text.contains('.') => format!("; do you mean https://{text}?"),
            _ => String::new(),
        };
        Err(format!(
            "`{text}` is not an http:// or https:// URL: {why}{meant}"
        ))
    };
    match text.parse::<Url>() {
        Ok(url) if matches!(url.scheme(), "http" | "https" | "d2tp") => Ok(url),
        Ok(url) => refuse(&format!("{}: is not supported", url.scheme())),
        Err(url::ParseError::RelativeUrlWithoutBase) => refuse("it has no https:// in front"),
        Err(error) => refuse(&error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_urls_may_have_comments_and_empty_lines_and_names_each_url_once() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let text = "# films\nhttps://h/a\r\n\n  https://h/b[1-3].mp4\nhttps://h/a\n";
        std::fs::write(file.path(), text).expect("written");
        let named = ["https://h/b[1-3].mp4", "https://h/c"].map(|url| url.parse().expect("a URL"));
        let urls = read_urls(&named, Some(file.path())).expect("URLs");
        let urls: Vec<&str> = urls.iter().map(Url::as_str).collect();
        // Brackets are characters of a name, not a pattern.
        assert_eq!(urls, ["https://h/b[1-3].mp4", "https://h/c", "https://h/a"]);
    }

    #[test]
    fn a_line_that_is_no_url_is_named_by_its_number() {
        let error = parse_lines("https://h/a\n\nh.example/b\n", "list.txt").unwrap_err();
        assert!(error.starts_with("list.txt, line 3: "), "{error}");
        assert!(
            error.ends_with("do you mean https://h.example/b?"),
            "{error}"
        );
        let none = tempfile::NamedTempFile::new().expect("a file");
        assert!(
            read_urls(&[], Some(none.path()))
                .unwrap_err()
                .ends_with("has no URL")
        );
    }
}
