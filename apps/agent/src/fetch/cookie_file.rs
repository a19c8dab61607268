//! Cookies from a file that curl, wget or a browser wrote: the format that Netscape had, one cookie a line.
//!
//! ```text
//!  domain          subdomains  path  secure  expires     name     value
//!  .example.org    TRUE        /     TRUE    1924992000  session  a1b2
//!  #HttpOnly_example.org  FALSE  /in  FALSE  0           token    c3      also a cookie; other lines with # are none
//! ```
//!
//! A cookie goes to the hosts, paths and schemes that its line names, after a redirect too, and to no others
//! (RFC 6265 §5.4). The file is read and never written. `cookie_store` and `cookie` read `Set-Cookie` fields and
//! JSON, not this format, so it is parsed here.

use std::path::Path;

use http::HeaderValue;
use jiff::Timestamp;
use url::{Host, Url};

use super::secret_file;

/// The mark of cookies that scripts of web pages do not get.
const HTTP_ONLY: &str = "#HttpOnly_";

/// The most bytes of the cookies for one request.
const HEADER_BYTES_MAX: usize = 8_190; // as curl, and the limit for a field of Apache httpd and nginx

/// A cookie of the file.
#[derive(Clone, PartialEq, Eq)]
struct StoredCookie {
    domain: String,
    with_subdomains: bool,
    path: String,
    secure: bool,
    /// When the cookie expires, in seconds since 1970; 0 is never.
    expires_s: i64,
    pair: String,
}

/// The cookies of a file.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct CookieFile {
    cookies: Vec<StoredCookie>,
}

impl std::fmt::Debug for CookieFile {
    /// Shows how many there are: their values are secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CookieFile({})", self.cookies.len())
    }
}

impl CookieFile {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or a line is no cookie; the sentence names file and line, and repeats no value.
    pub fn read(path: &Path) -> Result<CookieFile, String> {
        let text = secret_file::read(path)?;
        CookieFile::parse(&text)
            .map_err(|(line, why)| format!("{} line {line}: {why}", path.display()))
    }

    fn parse(text: &str) -> Result<CookieFile, (usize, String)> {
        let mut cookies = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let cookie = match line.strip_prefix(HTTP_ONLY) {
                Some(cookie) => cookie,
                None if line.starts_with('#') || line.trim().is_empty() => continue,
                None => line,
            };
            cookies.push(StoredCookie::parse(cookie).map_err(|why| (number, why))?);
        }
        // RFC 6265 §5.4: those with longer paths first.
        cookies.sort_by_key(|cookie| std::cmp::Reverse(cookie.path.len()));
        Ok(CookieFile { cookies })
    }

    /// The value of the Cookie field of a request to `url`; none if no cookie is for it.
    pub fn header_for(&self, url: &Url, now: Timestamp) -> Option<HeaderValue> {
        let mut text = String::new();
        for cookie in self.cookies.iter().filter(|cookie| cookie.is_for(url, now)) {
            if text.len() + cookie.pair.len() + 2 > HEADER_BYTES_MAX {
                break;
            }
            if !text.is_empty() {
                text += "; ";
            }
            text += &cookie.pair;
        }
        let mut value = HeaderValue::from_str(&text)
            .ok()
            .filter(|_| !text.is_empty())?;
        value.set_sensitive(true);
        Some(value)
    }
}

impl StoredCookie {
    fn parse(line: &str) -> Result<StoredCookie, String> {
        let fields: Vec<&str> = line.split('\t').collect();
        // curl leaves out an empty value.
        let (domain, subdomains, path, secure, expires, name, value) = match fields[..] {
            [domain, subdomains, path, secure, expires, name, value] => {
                (domain, subdomains, path, secure, expires, name, value)
            }
            [domain, subdomains, path, secure, expires, name] => {
                (domain, subdomains, path, secure, expires, name, "")
            }
            _ => {
                let n = fields.len();
                return Err(format!(
                    "a cookie is 7 fields between tabs (domain, TRUE or FALSE, path, TRUE or FALSE, time, name, \
                     value), and this line has {n}"
                ));
            }
        };
        let is_true = |text: &str, what: &str| match text {
            _ if text.eq_ignore_ascii_case("true") => Ok(true),
            _ if text.eq_ignore_ascii_case("false") => Ok(false),
            _ => Err(format!("the field for {what} is neither TRUE nor FALSE")),
        };
        let domain = domain.trim().trim_start_matches('.').to_ascii_lowercase();
        if domain.is_empty() || name.is_empty() {
            return Err("the cookie has no domain or no name".to_owned());
        }
        // Some browsers write fractions.
        let expires = expires.split('.').next().unwrap_or_default();
        let expires_s = expires.parse();
        let pair = format!("{name}={value}");
        let is_bad = |c: char| c.is_control() || c == ';';
        if pair.contains(is_bad) || HeaderValue::from_str(&pair).is_err() {
            return Err("the cookie has a character that no cookie can have".to_owned());
        }
        Ok(StoredCookie {
            domain,
            with_subdomains: is_true(subdomains, "subdomains")?,
            path: match path.starts_with('/') {
                true => path.to_owned(),
                false => "/".to_owned(),
            },
            secure: is_true(secure, "https only")?,
            expires_s: expires_s
                .map_err(|_| "the time of expiry is not a number of seconds".to_owned())?,
            pair,
        })
    }

    fn is_for(&self, url: &Url, now: Timestamp) -> bool {
        let is_host = match url.host() {
            Some(Host::Domain(host)) => {
                let above = host.strip_suffix(&self.domain);
                above == Some("")
                    || (self.with_subdomains && above.is_some_and(|above| above.ends_with('.')))
            }
            // An address has no subdomains.
            Some(_) => url.host_str() == Some(&self.domain),
            None => false,
        };
        // RFC 6265 §5.1.4.
        let below = url.path().strip_prefix(&*self.path);
        let is_path = below.is_some_and(|below| {
            below.is_empty() || self.path.ends_with('/') || below.starts_with('/')
        });
        let is_alive = self.expires_s == 0 || self.expires_s > now.as_second();
        is_host && is_path && is_alive && (!self.secure || url.scheme() == "https")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file as curl writes it.
    const FILE: &str = "# Netscape HTTP Cookie File\n\
        # https://curl.se/docs/http-cookies.html\n\n\
        .example.org\tTRUE\t/\tFALSE\t0\ta\t1\n\
        example.org\tFALSE\t/in\tFALSE\t0\tb\t2\n\
        #HttpOnly_example.org\tFALSE\t/\tTRUE\t4102444800\tc\t3=3\n\
        other.example\tTRUE\t/\tFALSE\t1000\told\tx\n\
        127.0.0.1\tFALSE\t/\tFALSE\t0\tlocal\t\r\n";

    fn sent(url: &str) -> Option<String> {
        let file = CookieFile::parse(FILE).expect("cookies");
        let now = "2030-01-01T00:00:00Z".parse().expect("a time");
        let value = file.header_for(&url.parse().expect("a URL"), now)?;
        Some(value.to_str().expect("text").to_owned())
    }

    #[test]
    fn a_cookie_goes_to_its_hosts_paths_and_schemes_and_to_no_others() {
        assert_eq!(sent("http://example.org/").as_deref(), Some("a=1"));
        assert_eq!(sent("http://www.example.org/x").as_deref(), Some("a=1"));
        assert_eq!(sent("http://example.org/in").as_deref(), Some("b=2; a=1"));
        assert_eq!(sent("http://example.org/in/x").as_deref(), Some("b=2; a=1"));
        assert_eq!(sent("http://example.org/inner").as_deref(), Some("a=1"));
        assert_eq!(sent("https://example.org/").as_deref(), Some("a=1; c=3=3"));
        assert_eq!(sent("http://127.0.0.1:8080/").as_deref(), Some("local="));
        for other in [
            "http://badexample.org/",
            "http://example.org.evil.example/",
            "http://org/",
            "http://1.127.0.0.1.example/",
        ] {
            assert_eq!(sent(other), None, "{other}");
        }
    }

    #[test]
    fn a_cookie_that_expired_is_not_sent() {
        assert_eq!(sent("http://other.example/"), None);
    }

    #[test]
    fn a_line_that_is_no_cookie_is_named_and_its_value_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("cookies.txt");
        for (line, why) in [
            ("h\tTRUE\t/\thush", "has 4"),
            ("h\tyes\t/\tFALSE\t0\tn\thush", "neither TRUE nor FALSE"),
            (
                "h\tTRUE\t/\tFALSE\tsoon\tn\thush",
                "not a number of seconds",
            ),
            ("h\tTRUE\t/\tFALSE\t0\tn\thush\u{7}", "no cookie can have"),
            ("Set-Cookie: n=hush", "has 1"),
        ] {
            std::fs::write(&path, format!("# Netscape\n{line}\n")).expect("written");
            let error = CookieFile::read(&path).expect_err(line);
            assert!(
                error.contains("cookies.txt line 2: ") && error.contains(why),
                "{error}"
            );
            assert!(!error.contains("hush"), "{error}");
        }
        let text = format!("{:?}", CookieFile::parse(FILE).expect("cookies"));
        assert_eq!(text, "CookieFile(5)");
    }
}
