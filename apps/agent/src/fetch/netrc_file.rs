//! User names and passwords from `~/.netrc`, as ftp(1) and curl read it.

use std::path::{Path, PathBuf};

use netrc::Netrc;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use url::Url;

use super::secret_file;

/// The name under which an entry for all other hosts is found.
const DEFAULT: &str = "default";

/// The entries of a netrc file, by host.
pub struct NetrcFile {
    path: PathBuf,
    known: Netrc,
}

impl NetrcFile {
    /// The path of the user's own file: `$NETRC`, else `~/.netrc`. None if there is none.
    pub fn default_path() -> Option<PathBuf> {
        Netrc::get_file()
    }

    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or a line makes no sense; the sentence names file and line, and repeats no word of it.
    pub fn read(path: &Path) -> Result<NetrcFile, String> {
        let text = secret_file::read(path)?;
        let known = text.parse().map_err(|_| {
            // What the parser says may repeat a password, and it does not count all lines.
            let line = bad_line(&text);
            format!(
                "{} line {line}: expected machine NAME, login NAME, password WORD, account WORD, default or macdef",
                path.display()
            )
        })?;
        Ok(NetrcFile {
            path: path.to_owned(),
            known,
        })
    }

    /// Puts the user name and the password for its host into a URL.
    ///
    /// # Errors
    /// The file has none for the host, or the URL has its own; in words.
    pub fn apply(&self, url: &mut Url) -> Result<(), String> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(format!("{}:// asks for no password", url.scheme()));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("the URL has a user name already; leave one of the two out".into());
        }
        let host = url.host_str().unwrap_or_default().to_owned();
        let hosts = &self.known.hosts;
        let found = hosts.get(&host).or_else(|| hosts.get(DEFAULT));
        let found =
            found.ok_or_else(|| format!("{} has no entry for {host}", self.path.display()))?;
        set_credentials(url, &found.login, &found.password);
        Ok(())
    }
}

/// The first line after which the text is no netrc file.
fn bad_line(text: &str) -> usize {
    let ends = text.match_indices('\n').map(|(at, _)| at + 1);
    let is_bad = |end: &usize| text[..*end].parse::<Netrc>().is_err();
    let mut ends = ends.chain([text.len()]);
    ends.position(|end| is_bad(&end)).map_or(1, |at| at + 1)
}

/// Puts a user name and a password into a URL, whatever is in them.
pub fn set_credentials(url: &mut Url, user: &str, password: &str) {
    // `url` leaves `%` as it is, and a reader of the URL decodes it.
    let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    url.set_username(&encoded(user))
        .expect("http has a user name");
    url.set_password(Some(&encoded(password)))
        .expect("http has a password");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_makes_no_sense_is_named_and_no_word_of_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("netrc");
        for (text, line) in [
            ("machine h login me\n# x\n\nmachine i hush\n", 4),
            ("hush", 1),
            ("machine h\n  login me\n  pasword hush\nmachine i\n", 3),
            (
                "# a comment\n#\nmacdef m\nget x\n\nmachine h passwd hush",
                6,
            ),
        ] {
            std::fs::write(&path, text).expect("written");
            let Err(error) = NetrcFile::read(&path) else {
                panic!("{text}");
            };
            assert!(error.contains(&format!("netrc line {line}: ")), "{error}");
            assert!(!error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn the_entry_of_the_host_is_used_and_else_the_default() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("netrc");
        let text = "machine h.example login me password p%41:/@\ndefault login any password x\n";
        std::fs::write(&path, text).expect("written");
        let file = NetrcFile::read(&path).expect("a netrc file");
        let mut url: Url = "http://h.example/a".parse().expect("a URL");
        file.apply(&mut url).expect("an entry");
        assert_eq!(url.as_str(), "http://me:p%2541%3A%2F%40@h.example/a");
        file.apply(&mut url).expect_err("it has one");
        let mut url: Url = "https://other.example/".parse().expect("a URL");
        file.apply(&mut url).expect("the default");
        assert_eq!((url.username(), url.password()), ("any", Some("x")));
    }
}
