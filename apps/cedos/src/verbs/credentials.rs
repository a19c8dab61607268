//! User names and passwords for servers: from the terminal, a file or ~/.netrc, rather than from the command
//! line, which every user of the machine can read for as long as the program runs (proc(5), `cmdline`).

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::BufRead;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::help::TRUST;
use cedos_agent::fetch::cookie_file::CookieFile;
use cedos_agent::fetch::header;
use cedos_agent::fetch::netrc_file::{NetrcFile, set_credentials};
use cedos_agent::fetch::report::print_stderr;
use cedos_agent::fetch::secret_file::permission_warning;
use cedos_agent::order::TransferOrder;
use clap::Args;
use url::Url;

/// The most bytes of a line with a password.
const PASSWORD_BYTES_MAX: u64 = 64 * 1024;

/// Where the user name and the password for a server come from.
#[derive(Debug, Args)]
pub struct CredentialArgs {
    /// Send the user name and password that ~/.netrc ($NETRC names another file) has for the host
    #[arg(long, help_heading = TRUST)]
    netrc: bool,

    /// Send the user name and password that FILE has for the host, in the format of ~/.netrc
    #[arg(long, value_name = "FILE", conflicts_with = "netrc", help_heading = TRUST)]
    netrc_file: Option<PathBuf>,

    /// Send this user name, and the password that is asked for on the terminal
    #[arg(long, value_name = "NAME", conflicts_with_all = ["netrc", "netrc_file"], value_parser = parse_user, help_heading = TRUST)]
    user: Option<String>,

    /// With --user: read the password from the first line of FILE; `-` is standard input
    #[arg(long, value_name = "FILE", requires = "user", help_heading = TRUST)]
    password_file: Option<PathBuf>,
}

/// Options of [`CredentialArgs`] that a process without a terminal is not handed. A value follows each.
const OPTIONS: [&str; 2] = ["--user", "--password-file"];

fn parse_user(text: &str) -> Result<String, String> {
    match text.contains(':') {
        // RFC 7617 §2: a user name has no colon. curl takes a password behind it.
        true => Err(
            "write the name alone: other users can read a password on the command line. It is \
                     asked for on the terminal, or read from --password-file FILE"
                .into(),
        ),
        false => Ok(text.to_owned()),
    }
}

impl CredentialArgs {
    fn is_given(&self) -> bool {
        self.netrc || self.netrc_file.is_some() || self.user.is_some()
    }

    /// The netrc file that is to be read, if one is; warns if others can read it.
    fn netrc_path(&self) -> Result<Option<PathBuf>, String> {
        let path = match &self.netrc_file {
            Some(path) => Some(path.clone()),
            None if self.netrc => Some(NetrcFile::default_path().ok_or("there is no ~/.netrc")?),
            None => None,
        };
        path.as_deref().inspect(|path| warn_once(path));
        Ok(path)
    }

    /// Puts the user name of --user and its password into the URLs. Asks for the password if it must.
    ///
    /// # Errors
    /// There is none; in words.
    pub fn apply_user(&self, urls: &mut [Url]) -> Result<(), String> {
        match self.user {
            Some(_) => self.apply(urls),
            None => Ok(()),
        }
    }

    /// Has an order name the netrc file, which is read whenever the transfer runs, so that no password is stored.
    ///
    /// # Errors
    /// There is none; in words.
    pub fn apply_to(&self, order: &mut TransferOrder) -> Result<(), String> {
        order.netrc = self.netrc_path()?;
        Ok(())
    }

    /// Puts user name and password into the URLs. Asks for the password if it must.
    ///
    /// # Errors
    /// There are none; in words.
    pub fn apply(&self, urls: &mut [Url]) -> Result<(), String> {
        if !self.is_given() {
            return Ok(());
        }
        if let Some(url) = urls
            .iter()
            .find(|url| !matches!(url.scheme(), "http" | "https"))
        {
            return Err(format!("{}:// asks for no password", url.scheme()));
        }
        if urls
            .iter()
            .any(|url| !url.username().is_empty() || url.password().is_some())
        {
            return Err("the URL has a user name already; leave one of the two out".into());
        }
        if let Some(user) = &self.user {
            let password = self.password(user)?;
            urls.iter_mut()
                .for_each(|url| set_credentials(url, user, &password));
            return Ok(());
        }
        let Some(path) = self.netrc_path()? else {
            return Ok(());
        };
        let file = NetrcFile::read(&path)?;
        urls.iter_mut().try_for_each(|url| file.apply(url))
    }

    fn password(&self, user: &str) -> Result<String, String> {
        let Some(file) = &self.password_file else {
            return rpassword::prompt_password(format!("Password of {user}: ")).map_err(|error| {
                format!(
                    "cannot ask for the password ({error}); give --password-file FILE or --netrc"
                )
            });
        };
        let read = if file == Path::new("-") {
            first_line(std::io::stdin().lock())
        } else {
            std::fs::File::open(file).and_then(|file| first_line(std::io::BufReader::new(file)))
        };
        read.map_err(|error| format!("cannot read the password in {}: {error}", file.display()))
    }

    /// The command line for a process that is handed it by a pipe: with the password that was asked for in
    /// place of --user, since that process has no terminal.
    pub fn resolved(&self, arguments: Vec<OsString>, before: &Url, after: &Url) -> Vec<OsString> {
        if self.user.is_none() {
            return arguments;
        }
        let mut resolved = Vec::new();
        let mut rest = arguments.into_iter();
        while let Some(argument) = rest.next() {
            let text = argument.to_str().unwrap_or_default();
            let name = text.split('=').next().unwrap_or_default();
            if OPTIONS.contains(&name) {
                if name == text {
                    rest.next();
                }
            } else if text.parse::<Url>().is_ok_and(|url| url == *before) {
                resolved.push(after.as_str().into());
            } else {
                resolved.push(argument);
            }
        }
        resolved
    }
}

fn first_line(input: impl BufRead) -> std::io::Result<String> {
    let mut line = String::new();
    std::io::Read::take(input, PASSWORD_BYTES_MAX).read_line(&mut line)?;
    Ok(line.trim_end_matches(['\n', '\r']).to_owned())
}

/// Warns if other users can read a file, once for all URLs of a command.
fn warn_once(path: &Path) {
    static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(warning) = permission_warning(path).filter(|_| warned.insert(path.to_owned())) {
        print_stderr(&format!("note: {warning}"));
    }
}

/// The file of the user's cookies.
#[derive(Debug, Args)]
pub struct CookieArgs {
    /// Send the cookies in FILE, as curl, wget and browsers' add-ons write it (Netscape format), to the hosts they
    /// are for. The file is not changed
    #[arg(long, value_name = "FILE", help_heading = TRUST)]
    cookie: Option<PathBuf>,
}

impl CookieArgs {
    /// The file, once it is known that it makes sense; warns if others can read it.
    ///
    /// # Errors
    /// It cannot be read; in words.
    pub fn path(&self) -> Result<Option<PathBuf>, String> {
        let Some(path) = &self.cookie else {
            return Ok(None);
        };
        CookieFile::read(path).map_err(|error| {
            // curl takes the cookie itself, too.
            let is_pair = !path.exists() && path.as_os_str().as_encoded_bytes().contains(&b'=');
            let hint = if is_pair {
                "; -H 'Cookie: NAME=VALUE' sends one cookie"
            } else {
                ""
            };
            error + hint
        })?;
        warn_once(path);
        Ok(Some(path.clone()))
    }
}

/// Overwrites passwords in the command line that other users of the machine see, and warns if there was one
/// in a URL. Whoever looked before has seen it.
pub fn hide_passwords() {
    let Ok(line) = std::fs::read("/proc/self/cmdline") else {
        return;
    };
    let (secrets, in_url) = secrets_in(&line);
    if in_url {
        print_stderr(
            "note: other users of this machine can read a password on the command line; use --user NAME \
             (asks for it), --password-file FILE or --netrc",
        );
    }
    if !secrets.is_empty() {
        // Without /proc, or where a sandbox forbids it, the line stays as it is.
        let _ = overwrite(&secrets);
    }
}

/// Overwrites what `secret_in` finds in the arguments of this program, as other users of the machine see
/// them.
pub fn hide_arguments(secret_in: impl Fn(&str) -> Option<Range<usize>>) {
    let Ok(line) = std::fs::read("/proc/self/cmdline") else {
        return;
    };
    let (mut secrets, mut at) = (Vec::new(), 0);
    for argument in line.split(|byte| *byte == 0) {
        let found = std::str::from_utf8(argument).ok().and_then(&secret_in);
        secrets.extend(found.map(|range| at + range.start..at + range.end));
        at += argument.len() + 1;
    }
    if !secrets.is_empty() {
        let _ = overwrite(&secrets);
    }
}

fn overwrite(secrets: &[Range<usize>]) -> std::io::Result<()> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // proc(5): arg_start is field 48; the name in field 2 may contain anything up to the last `)`.
    let behind_name = stat.rsplit(')').next().unwrap_or_default();
    let start = behind_name.split_whitespace().nth(48 - 3);
    let start: u64 = start.and_then(|text| text.parse().ok()).unwrap_or(0);
    let memory = OpenOptions::new().write(true).open("/proc/self/mem")?;
    for secret in secrets {
        memory.write_all_at(&vec![b'x'; secret.len()], start + secret.start as u64)?;
    }
    Ok(())
}

/// Where passwords are in a command line as the kernel shows it, and whether one of them is in a URL.
fn secrets_in(line: &[u8]) -> (Vec<Range<usize>>, bool) {
    let (mut secrets, mut in_url) = (Vec::new(), false);
    let mut at = 0;
    let mut is_header = false;
    for argument in line.split(|byte| *byte == 0) {
        let text = std::str::from_utf8(argument).unwrap_or_default();
        let field = match is_header {
            true => Some(text),
            false => text
                .strip_prefix("--header=")
                .or_else(|| text.strip_prefix("-H")),
        };
        is_header = matches!(text, "-H" | "--header");
        if let Some(password) = password_in(text) {
            in_url = true;
            secrets.push(at + password.start..at + password.end);
        } else if let Some(field) = field
            && header::parse(field).is_ok_and(|field| field.is_credential())
        {
            let value = text.find(':').map_or(0, |colon| colon + 1);
            secrets.push(at + value..at + text.len());
        }
        at += argument.len() + 1;
    }
    (secrets, in_url)
}

/// Where the password is in a URL, if it has one.
fn password_in(text: &str) -> Option<Range<usize>> {
    let scheme = text.find("://")?;
    let letters = |c: char| c.is_ascii_alphanumeric();
    if scheme == 0 || !text[..scheme].chars().all(letters) {
        return None;
    }
    let start = scheme + 3;
    let authority = text[start..].split(['/', '?', '#']).next()?;
    let user_info = &authority[..authority.rfind('@')?];
    let colon = user_info.find(':')?;
    (colon + 1 < user_info.len()).then(|| start + colon + 1..start + user_info.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        credentials: CredentialArgs,
    }

    fn args(words: &[&str]) -> CredentialArgs {
        Cli::parse_from([&["x"], words].concat()).credentials
    }

    #[test]
    fn passwords_on_a_command_line_are_found_and_nothing_else() {
        let line = b"cedos\0get\0http://me:hu@sh@h:80/a:b@c\0-H\0Cookie: a=b\0--header=Accept: x\0http://me@h/\0d2tp://h:1/K/p\0";
        let (secrets, in_url) = secrets_in(line);
        let found: Vec<&[u8]> = secrets.into_iter().map(|range| &line[range]).collect();
        assert_eq!(found, [&b"hu@sh"[..], &b" a=b"[..]]);
        assert!(in_url);
        assert!(!secrets_in(b"cedos\0get\0http://h/a:b@c\0").1);
    }

    #[test]
    fn a_password_comes_from_netrc_or_a_file_whatever_is_in_it() {
        let place = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            std::fs::write(place.path().join(name), text).unwrap();
            place.path().join(name).display().to_string()
        };
        let netrc = file(
            "netrc",
            "machine h.example login me password p%41:/@\ndefault login any password x\n",
        );
        let mut urls =
            ["http://h.example/a", "https://other.example/"].map(|url| url.parse().unwrap());
        args(&["--netrc-file", &netrc]).apply(&mut urls).unwrap();
        assert_eq!(urls[0].as_str(), "http://me:p%2541%3A%2F%40@h.example/a");
        assert_eq!((urls[1].username(), urls[1].password()), ("any", Some("x")));
        let twice = args(&["--netrc-file", &netrc]).apply(&mut urls);
        assert!(twice.unwrap_err().contains("user name already"));
        let secret = file("password", "hush hush\r\nmore");
        let mut urls = ["http://h.example/a".parse().unwrap()];
        args(&["--user", "me", "--password-file", &secret])
            .apply(&mut urls)
            .unwrap();
        assert_eq!(urls[0].password(), Some("hush%20hush"));
        let mut urls = ["http://h.example/a".parse().unwrap()];
        let only_other = file("other", "machine o.example login me password p");
        let lacks = args(&["--netrc-file", &only_other])
            .apply(&mut urls)
            .unwrap_err();
        assert!(lacks.ends_with("has no entry for h.example"), "{lacks}");
        let broken = file("broken", "machine h.example hush");
        let error = args(&["--netrc-file", &broken])
            .apply(&mut urls)
            .unwrap_err();
        assert!(!error.contains("hush"), "{error}");
        assert!(Cli::try_parse_from(["x", "--user", "me:hush"]).is_err());
    }

    #[test]
    fn a_command_line_that_is_handed_over_has_the_password_and_no_question() {
        let before: Url = "http://h/a".parse().unwrap();
        let after: Url = "http://me:p@h/a".parse().unwrap();
        let line = [
            "cedos",
            "get",
            "--user",
            "me",
            "http://h/a",
            "--password-file=f",
            "-o",
            "out",
        ];
        let given =
            args(&["--user", "me"]).resolved(line.map(OsString::from).to_vec(), &before, &after);
        assert_eq!(given, ["cedos", "get", "http://me:p@h/a", "-o", "out"]);
    }
}
