//! The order of a download or an upload, as a command line or a program gives it, and as the queue
//! stores it.
//!
//! ```text
//!  {"verb":"get", "url":"https://…", "file":"/home/me/a.mp3", "deadline":{"at":"2030-01-31T07:30:00Z"}}
//! ```
//!
//! Omitted members have the defaults of the command line, except the deadline: without it there is
//! none.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use url::Url;

use crate::fetch::header;
use crate::fetch::local_hosts::LocalHosts;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::request_method::RequestMethod;
use crate::fetch::transfer::{Destination, TransferJob};
use crate::recurrence::{LEAD_DEFAULT, RecurringTime};
use crate::terms::{DueTime, TransferTerms};

/// Tries without a new byte before giving up on an origin.
pub const TRIES: u32 = 8;
/// How many seconds a connection may carry nothing.
pub const STALL_S: f64 = 10.0;

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransferVerb {
    /// A download to this device.
    Get,
    /// An upload from this device.
    Put,
}

impl TransferVerb {
    /// The name as it is written in an order.
    pub fn as_str(self) -> &'static str {
        match self {
            TransferVerb::Get => "get",
            TransferVerb::Put => "put",
        }
    }
}

/// The deadline of an order.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Deadline {
    /// At this point in time.
    At(Timestamp),
    /// This many seconds after the request.
    WithinS(f64),
}

impl Deadline {
    /// The deadline, if the request is made now.
    pub fn due(self) -> DueTime {
        match self {
            Deadline::At(at) => DueTime::At(at),
            Deadline::WithinS(s) => {
                DueTime::within(Duration::try_from_secs_f64(s).unwrap_or_default())
            }
        }
    }

    /// Whether the deadline has passed before the transfer begins.
    pub fn has_passed(self) -> bool {
        match self {
            Deadline::At(at) => at <= Timestamp::now(),
            Deadline::WithinS(s) => s.is_nan() || s <= 0.0,
        }
    }
}

/// How a folder is mirrored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorOptions {
    /// Patterns of the only files that are mirrored; none are all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<String>,
    /// Patterns of files that are left out, whatever is included.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
    /// Whether files are deleted that the source does not have.
    #[serde(default)]
    pub delete: bool,
}

/// A request for a transfer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransferOrder {
    /// Whether the order is a download or an upload.
    pub verb: TransferVerb,
    /// The URL of the object: source of a download, destination of an upload.
    pub url: String,
    /// The destination of a download, replaced when it is complete; or the file to upload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Whether the file of a download is replaced if it exists; otherwise the download gets a name with a number.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub replaces: bool,
    /// The folder of a download that gets its own file name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<PathBuf>,
    /// The deadline; none is no deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Deadline>,
    /// The cost policy: `free-only`, `free-first`, `balanced`, `fast` or `any`.
    #[serde(default = "free_first")]
    pub policy: String,
    /// What to do when free links are too slow for the deadline: `cell`, `wait` or `fail`.
    #[serde(default = "cell")]
    pub if_late: String,
    /// Whether the transfer must start at once or fail.
    #[serde(default)]
    pub now: bool,
    /// The most bytes that metered links may carry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cell: Option<u64>,
    /// The priority when not all transfers can be in time: 0 to 7, higher goes first.
    #[serde(default)]
    pub priority: u8,
    /// The bytes at the beginning that are wanted before the rest of other transfers that have such a beginning; none or 0 is
    /// no sooner than the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_bytes: Option<u64>,
    /// When the transfer saves energy: `auto`, `always` or `never`; none is as the device does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub save_energy: Option<String>,
    /// The digest the object must have, `sha256:HEX`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub integrity: Option<String>,
    /// Tries without a new byte before the origin is given up.
    #[serde(default = "tries")]
    pub tries: u32,
    /// How many seconds a connection may carry nothing.
    #[serde(default = "stall_s")]
    pub stall_s: f64,
    /// The most bytes that a download may take in, or an upload send, per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_rate: Option<u64>,
    /// The name of the downloads that have `limit_rate` together; none is this one alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_group: Option<String>,
    /// Whether redirects from https to http are followed.
    #[serde(default)]
    pub allow_downgrade: bool,
    /// The hosts of local networks that the download may lead to, redirects included; none is any.
    #[serde(default, skip_serializing_if = "LocalHosts::is_any")]
    pub local_hosts: LocalHosts,
    /// Header fields for the request, `Name: value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<String>,
    /// A netrc file with the user name and the password for the URL's host. It is read whenever the transfer runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netrc: Option<PathBuf>,
    /// A file of cookies for the requests, as curl and wget write it. It is read whenever the transfer runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cookies: Option<PathBuf>,
    /// Whether the proxy only opens a tunnel.
    #[serde(default)]
    pub sealed: bool,
    /// A file of trusted authorities in PEM, in addition to the system's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// The proxy to go through, `d2tp://host:port/KEY`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prox: Option<String>,
    /// The path of this device's key file, if not the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// Whether an upload is a POST, sent to the origin once at most.
    #[serde(default)]
    pub post: bool,
    /// The token by which the proxy recognises an upload: two orders with the same token are the same
    /// upload, and a POST is delivered once. The agent creates one if none is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// The media type of an uploaded file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// The times by which the transfer is to be complete again and again, such as `weekdays 07:30`; such an order has
    /// no other deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every: Option<String>,
    /// How many seconds before its deadline each run of a recurring transfer begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lead_s: Option<f64>,
    /// Older versions of the file that are kept when a download replaces it: `FILE.1` is the newest.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub keep_older: u32,
    /// How a folder is mirrored: `url` and `file` are folders then. None is one object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<MirrorOptions>,
}

fn free_first() -> String {
    "free-first".into()
}

fn cell() -> String {
    "cell".into()
}

fn tries() -> u32 {
    TRIES
}

fn stall_s() -> f64 {
    STALL_S
}

fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_yes(value: &bool) -> bool {
    *value
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(value: &u32) -> bool {
    *value == 0
}

impl TransferOrder {
    /// Creates an order with all defaults.
    pub fn new(verb: TransferVerb, url: &str) -> TransferOrder {
        TransferOrder {
            verb,
            url: url.to_owned(),
            file: None,
            replaces: true,
            folder: None,
            deadline: None,
            policy: free_first(),
            if_late: cell(),
            now: false,
            max_cell: None,
            priority: 0,
            start_bytes: None,
            save_energy: None,
            integrity: None,
            tries: TRIES,
            stall_s: STALL_S,
            limit_rate: None,
            limit_group: None,
            allow_downgrade: false,
            local_hosts: LocalHosts::ANY,
            headers: Vec::new(),
            netrc: None,
            cookies: None,
            sealed: false,
            ca: None,
            prox: None,
            key: None,
            post: false,
            token: None,
            content_type: None,
            every: None,
            lead_s: None,
            keep_older: 0,
            mirror: None,
        }
    }

    /// The terms it asks for, their time counted from now.
    ///
    /// # Errors
    /// A word is none of those there are.
    pub fn terms(&self) -> Result<TransferTerms, TransferFailure> {
        let word = |error: d2tp_sched::ParsePolicyError| TransferFailure::usage(error.to_string());
        if self.priority > 7 {
            return Err(TransferFailure::usage("a priority is 0 to 7"));
        }
        Ok(TransferTerms {
            due: self.deadline.map(Deadline::due),
            policy: self.policy.parse().map_err(word)?,
            if_late: self.if_late.parse().map_err(word)?,
            metered_bytes_max: self.max_cell,
            priority: self.priority,
            start_bytes: self.start_bytes,
            energy: (self.save_energy.as_deref().map(str::parse).transpose())
                .map_err(TransferFailure::usage)?,
        })
    }

    /// The job it is, on terms of its own.
    ///
    /// # Errors
    /// It makes no sense; in words.
    pub fn job(&self) -> Result<TransferJob, TransferFailure> {
        let terms = self.terms()?;
        self.job_on(terms)
    }

    /// The job it is, on these terms.
    ///
    /// # Errors
    /// As [`TransferOrder::job`].
    pub fn job_on(&self, terms: TransferTerms) -> Result<TransferJob, TransferFailure> {
        let url: Url = self.url.parse().map_err(|error: url::ParseError| {
            TransferFailure::usage(format!("`{}` is not a URL: {error}", self.url))
        })?;
        let destination = match (self.verb, &self.file, &self.folder) {
            (TransferVerb::Put, ..) => Destination::Nowhere,
            (TransferVerb::Get, Some(file), _) if is_standard_output(file) => Destination::Stdout,
            (TransferVerb::Get, Some(file), _) if is_character_device(file) => {
                Destination::Device(file.clone())
            }
            (TransferVerb::Get, Some(file), _) if !self.replaces => {
                Destination::NewFile(file.clone())
            }
            (TransferVerb::Get, Some(file), _) => Destination::File(file.clone()),
            (TransferVerb::Get, None, folder) => {
                Destination::InDirectory(folder.clone().unwrap_or_default())
            }
        };
        let fields: Result<Vec<_>, String> =
            self.headers.iter().map(|f| header::parse(f)).collect();
        let integrity = self.integrity.as_deref().map(parse_integrity).transpose();
        let stall = Duration::try_from_secs_f64(self.stall_s).ok();
        Ok(TransferJob {
            url,
            destination,
            terms,
            now: self.now,
            integrity: integrity.map_err(TransferFailure::usage)?,
            tries_max: self.tries.max(1),
            stall: stall
                .filter(|stall| !stall.is_zero())
                .ok_or_else(|| TransferFailure::usage("stall_s is a number of seconds above 0"))?,
            allow_downgrade: self.allow_downgrade,
            fields: fields.map_err(TransferFailure::usage)?.into(),
            cookies: None,
            unless: None,
            keep_older: self.keep_older,
            method: RequestMethod::Get,
        })
    }

    /// The times by which the transfer recurs, and how long before each a run begins; none if it does not recur.
    ///
    /// # Errors
    /// It makes no sense; in words.
    pub fn recurrence(&self) -> Result<Option<(RecurringTime, Duration)>, TransferFailure> {
        let Some(every) = &self.every else {
            return Ok(None);
        };
        let time = every.parse().map_err(TransferFailure::usage)?;
        let lead = self.lead_s.map(Duration::try_from_secs_f64).transpose();
        let lead = lead
            .ok()
            .filter(|lead| lead.is_none_or(|lead| !lead.is_zero()));
        let lead =
            lead.ok_or_else(|| TransferFailure::usage("lead_s is a number of seconds above 0"))?;
        if self.deadline.is_some() || self.now {
            let text = "a transfer that recurs has the deadlines of its schedule, and no other";
            return Err(TransferFailure::usage(text));
        }
        Ok(Some((time, lead.unwrap_or(LEAD_DEFAULT))))
    }

    /// The order with absolute paths, as one that leaves this process must have.
    ///
    /// # Errors
    /// The working directory is gone.
    pub fn with_absolute_paths(mut self) -> std::io::Result<TransferOrder> {
        let paths = [
            &mut self.file,
            &mut self.ca,
            &mut self.key,
            &mut self.netrc,
            &mut self.cookies,
        ];
        for path in paths.into_iter().flatten() {
            *path = std::path::absolute(&*path)?;
        }
        if self.verb == TransferVerb::Get && self.file.is_none() {
            let folder = self.folder.take().unwrap_or_default();
            self.folder = Some(match folder.as_os_str().is_empty() {
                true => std::env::current_dir()?,
                false => std::path::absolute(folder)?,
            });
        }
        Ok(self)
    }
}

/// Reads `sha256:HEX`.
///
/// # Errors
/// It is none; in words.
pub fn parse_integrity(text: &str) -> Result<[u8; 32], String> {
    let refuse = || format!("`{text}` is not sha256: and 64 hexadecimal digits");
    let digits = text.strip_prefix("sha256:").ok_or_else(refuse)?;
    let mut digest = [0; 32];
    hex::decode_to_slice(digits, &mut digest).map_err(|_| refuse())?;
    Ok(digest)
}

fn is_standard_output(path: &Path) -> bool {
    path.as_os_str() == "-" || path == Path::new("/dev/stdout")
}

/// Whether the path leads to a character device: it is written to, and never replaced by a file.
fn is_character_device(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|found| found.file_type().is_char_device())
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_sched::CostPolicy;

    #[test]
    fn what_is_left_out_is_as_on_the_command_line() {
        let text = r#"{"verb":"get","url":"http://h/a"}"#;
        let order: TransferOrder = serde_json::from_str(text).unwrap();
        assert_eq!(order, TransferOrder::new(TransferVerb::Get, "http://h/a"));
        let job = order.job().unwrap();
        assert_eq!(job.terms.policy, CostPolicy::FreeFirst);
        assert_eq!((job.terms.due, job.tries_max), (None, 8));
        let again: TransferOrder =
            serde_json::from_str(&serde_json::to_string(&order).unwrap()).unwrap();
        assert_eq!(again, order);
    }

    #[test]
    fn a_field_that_is_unknown_or_a_word_that_is_none_is_refused() {
        let unknown = r#"{"verb":"get","url":"http://h/a","polcy":"any"}"#;
        let error = serde_json::from_str::<TransferOrder>(unknown).unwrap_err();
        assert!(error.to_string().contains("polcy"), "{error}");
        for (field, value) in [
            ("policy", "cheap"),
            ("if_late", "never"),
            ("integrity", "md5:1"),
        ] {
            let text = format!(r#"{{"verb":"get","url":"http://h/a","{field}":"{value}"}}"#);
            let order: TransferOrder = serde_json::from_str(&text).unwrap();
            let failure = order.job().unwrap_err();
            assert!(failure.text.contains(value), "{}", failure.text);
        }
    }

    #[test]
    fn both_kinds_of_deadline_are_read() {
        let read = |text: &str| serde_json::from_str::<Deadline>(text);
        let at = read(r#"{"at":"2030-01-31T07:30:00Z"}"#).unwrap().due();
        assert_eq!(at, DueTime::At("2030-01-31T07:30:00Z".parse().unwrap()));
        let within = read(r#"{"within_s":90}"#).unwrap().due().time_left();
        assert!(within.abs_diff(Duration::from_secs(90)) < Duration::from_secs(5));
        assert!(read(r#"{"by":"07:30"}"#).is_err());
        let passed = |text: &str| read(text).unwrap().has_passed();
        assert!(passed(r#"{"at":"2020-01-31T07:30:00Z"}"#) && passed(r#"{"within_s":0}"#));
        assert!(!passed(r#"{"within_s":1}"#));
    }
}
