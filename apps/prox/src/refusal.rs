//! All error answers of the proxy itself or of its connection to the origin, one row each.
//!
//! A refusal becomes an HTTP answer with a status, a `Proxy-Status` field (RFC 9209) that names
//! the kind for programs, and a sentence that tells people what to do. `docs/proxy.md` has the same
//! table.

use std::net::IpAddr;
use std::time::Duration;

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

use crate::egress::SpecialAddress;

/// The default wait for a client that met a limit.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// Why the proxy answered with its own error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // Each variant's message is its documentation.
pub enum ProxRefusal {
    #[error(
        "the request head is larger than {max} bytes; send fewer or smaller headers (cookies?)"
    )]
    HeadTooLarge { max: usize },
    #[error("the request is not valid HTTP/1.1: {0}")]
    BadRequest(&'static str),
    #[error("the request head did not arrive within {0:?}; send it again")]
    RequestTimeout(Duration),
    #[error("this proxy speaks HTTP/1.1 only on the device side")]
    VersionUnsupported,
    #[error("Expect: only 100-continue is known")]
    ExpectationUnknown,
    #[error("{0} is not served here: write methods in capitals; for TRACE use CONNECT")]
    MethodUnsupported(String),
    #[error("{0}: URLs cannot be fetched here, only http: and https:; use CONNECT for the rest")]
    SchemeUnsupported(String),

    #[error(
        "this client key is not allowed; the operator adds it with `cedos prox invite`, or --allow-client {0}"
    )]
    ClientUnknown(String),
    #[error("this invitation was used already, by another device; ask the operator for a new one")]
    InvitationUsed,
    #[error("this invitation was used already, by this device")]
    InvitationUsedByThisDevice,
    #[error("this invitation has expired; ask the operator for a new one")]
    InvitationExpired,
    #[error("this proxy made no such invitation; ask the operator for a new one")]
    InvitationUnknown,
    #[error("this proxy has as many clients as it can keep; the operator removes some first")]
    ClientsFull,
    #[error("this client has {0} flows open, which is its limit; wait for one to end")]
    ClientFlowsFull(u32),
    #[error(
        "this client has used the {} that it may transfer here in a month; it can go on at {until} 00:00 UTC, or \
         when the proxy's operator allows it more (`cedos prox client limit`)",
        in_bytes(*bytes)
    )]
    MonthUsedUp { bytes: u64, until: Date },
    #[error("this client's flows fill its part of the proxy's memory; wait for one to end")]
    ClientMemoryFull,
    #[error("the proxy serves {0} flows, which is its limit; try again later")]
    FlowsFull(u32),
    #[error("the deadline is further away than this proxy keeps a flow ({0:?}); set a nearer one")]
    DeadlineTooFar(Duration),
    #[error("this client's objects already fill its {0} bytes here; wait for one to be delivered")]
    ClientPinnedFull(u64),
    #[error("the proxy has no room for this object now; try again later")]
    StoreFull,
    #[error("the proxy cannot write its state directory; its operator finds the cause in the log")]
    StoreFailed,
    #[error("the object has {bytes} bytes and this proxy holds at most {max}; use CONNECT")]
    ObjectTooLarge { bytes: u64, max: u64 },
    #[error("the upload has {bytes} bytes and this proxy holds at most {max}; use CONNECT")]
    UploadTooLarge { bytes: u64, max: u64 },
    #[error("the proxy waits for the store or the bucket that has this upload; try again later")]
    UploadAwaited,
    #[error("the proxy is stopping; try again in a moment")]
    Stopping,

    #[error("this proxy does not relay")]
    NoRelay,
    #[error(
        "no device with that key listens here for this client; start it there first (`cedos \
        serve --prox`)"
    )]
    NoListener,
    #[error("{0}; end one, or try again later")]
    RelaysFull(String),
    #[error("the proxy has no socket for a relay: {0}")]
    RelayFailed(String),
    #[error(
        "this proxy carries no IP packets; its operator allows that with --tunnel-net (`cedos prox --help`)"
    )]
    NoPacketTunnels,
    #[error(
        "all addresses of this proxy's tunnel network are given; its operator gives a larger --tunnel-net"
    )]
    TunnelAddressesFull,
    #[error("nobody waits under this number")]
    NoMailbox,
    #[error("too many wait under a number; end one, or try again later")]
    MailboxesFull,

    #[error(
        "there is nothing here; the proxy's operator makes links for podcast apps (`cedos prox feeds`)"
    )]
    LinkUnknown,
    #[error(
        "this link was withdrawn; ask the proxy's operator for a new list (`cedos prox feeds`)"
    )]
    LinkWithdrawn,
    #[error("{host} answered {status} instead of the feed")]
    FeedMissing { host: String, status: u16 },
    #[error("the feed of {host} cannot be read: {cause}")]
    FeedUnreadable { host: String, cause: String },

    #[error("port {0} is not served by this proxy")]
    PortRefused(u16),
    #[error(
        "{host} is {}{kind}; the operator can allow it with {}",
        unless_said(host, address), what_opens(*kind, *address)
    )]
    AddressRefused {
        host: String,
        address: IpAddr,
        kind: SpecialAddress,
    },
    #[error("the name {host} was not found: {cause}; check the spelling")]
    NameNotFound { host: String, cause: String },
    #[error("looking up {0} took too long; try again")]
    NameTimeout(String),
    #[error("{0} refused the connection; the server is down or the port is wrong")]
    ConnectRefused(String),
    #[error("{host} cannot be reached from the proxy: {cause}")]
    Unroutable { host: String, cause: String },
    #[error("{host} did not accept a connection within {limit:?}; try again later")]
    ConnectTimeout { host: String, limit: Duration },
    #[error("the certificate of {host} is not trusted: {cause}; nothing was requested from it")]
    Certificate { host: String, cause: String },
    #[error("TLS with {host} failed: {cause}")]
    Tls { host: String, cause: String },

    #[error("{host} took the request but sent no answer within {limit:?}; try again later")]
    ResponseTimeout { host: String, limit: Duration },
    #[error("{host} closed the connection before answering: {cause}; try again")]
    OriginClosed { host: String, cause: String },
    #[error("{0} closed a connection that was kept for this request; try again")]
    KeptConnClosed(String),
    #[error("{host} did not answer in valid HTTP: {cause}")]
    OriginProtocol { host: String, cause: String },
    #[error("the answer head of {0} is too large")]
    OriginHeadTooLarge(String),
    #[error("{0} answered with a part that was not requested")]
    UnexpectedPartial(String),
    #[error("more than {0} redirects; the last one led to {1}")]
    TooManyRedirects(u32, String),
    #[error(
        "redirected from https to plain http ({0}), which is refused; request that URL itself \
        if you mean it"
    )]
    RedirectDowngrade(String),
    #[error("redirected to a URL that cannot be fetched: {0}")]
    RedirectUnusable(String),
    #[error("the origin's body ended early and cannot be resumed: {0}")]
    BodyLost(String),
    #[error("only-if-cached: this proxy has no copy of it that is fresh")]
    NotCached,
}

/// A number of bytes for people, in powers of 1000.
fn in_bytes(bytes: u64) -> String {
    let units = ["bytes", "kB", "MB", "GB", "TB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1_000.0 && unit + 1 < units.len() {
        value /= 1_000.0;
        unit += 1;
    }
    match value.fract() == 0.0 {
        true => format!("{value} {}", units[unit]),
        false => format!("{value:.1} {}", units[unit]),
    }
}

/// The address in words, unless the URL itself states it.
fn unless_said(host: &str, address: &IpAddr) -> String {
    match host.trim_matches(['[', ']']).parse::<IpAddr>() {
        Ok(said) if said == *address => String::new(),
        _ => format!("{address}, "),
    }
}

/// The setting that allows such addresses.
fn what_opens(kind: SpecialAddress, address: IpAddr) -> String {
    match kind {
        SpecialAddress::Private => "--allow-net or --allow-private".to_owned(),
        SpecialAddress::Metadata => format!("--allow-net {address}"),
        SpecialAddress::LinkLocal | SpecialAddress::Multicast | SpecialAddress::Reserved => {
            "--allow-net".to_owned()
        }
    }
}

impl ProxRefusal {
    /// The HTTP status of the answer.
    pub fn status(&self) -> u16 {
        self.row().0
    }

    /// The `Proxy-Status` error type (RFC 9209 §2.3).
    pub fn token(&self) -> &'static str {
        self.row().1
    }

    /// Whether the cause is the origin, so that a stale copy may be served instead.
    pub(crate) fn is_of_origin(&self) -> bool {
        use ProxRefusal::*;
        self.is_before_request()
            || matches!(
                self,
                ResponseTimeout { .. }
                    | OriginClosed { .. }
                    | OriginProtocol { .. }
                    | OriginHeadTooLarge(_)
            )
    }

    /// Whether the refusal came before anything was asked of the origin, so that nothing in the
    /// request can have caused it.
    pub(crate) fn is_before_request(&self) -> bool {
        use ProxRefusal::*;
        matches!(
            self,
            NameNotFound { .. }
                | NameTimeout(_)
                | ConnectRefused(_)
                | Unroutable { .. }
                | ConnectTimeout { .. }
                | Certificate { .. }
                | Tls { .. }
        )
    }

    /// When to try again, for answers that carry `Retry-After`.
    pub fn retry_after(&self) -> Option<Duration> {
        if let ProxRefusal::MonthUsedUp { until, .. } = self {
            let until = until.to_zoned(TimeZone::UTC).ok()?.timestamp();
            return Duration::try_from(until.duration_since(Timestamp::now())).ok();
        }
        (self.status() == 503).then_some(RETRY_AFTER)
    }

    /// The limit that was reached, as logs and metrics call it; none if the cause is another.
    pub fn limit(&self) -> Option<&'static str> {
        use ProxRefusal::*;
        Some(match self {
            ClientFlowsFull(_) => "client_flows",
            ClientMemoryFull => "client_memory",
            ClientPinnedFull(_) => "client_pinned",
            MonthUsedUp { .. } => "client_month",
            DeadlineTooFar(_) => "client_deadline",
            FlowsFull(_) => "flows",
            StoreFull => "storage",
            ObjectTooLarge { .. } | UploadTooLarge { .. } => "object_size",
            ClientsFull => "clients",
            RelaysFull(_) => "relays",
            MailboxesFull => "mailboxes",
            TunnelAddressesFull => "tunnel_addresses",
            _ => return None,
        })
    }

    /// The table: status and `Proxy-Status` error type of each refusal.
    fn row(&self) -> (u16, &'static str) {
        use ProxRefusal::*;
        match self {
            HeadTooLarge { .. } => (431, "http_request_error"),
            BadRequest(_) => (400, "http_request_error"),
            RequestTimeout(_) => (408, "http_request_error"),
            VersionUnsupported => (505, "http_request_error"),
            ExpectationUnknown => (417, "http_request_error"),
            MethodUnsupported(_) => (501, "http_request_error"),
            SchemeUnsupported(_) => (501, "http_request_error"),
            ClientUnknown(_) => (403, "http_request_denied"),
            InvitationUsed | InvitationUnknown => (403, "http_request_denied"),
            InvitationUsedByThisDevice => (409, "http_request_denied"),
            InvitationExpired => (410, "http_request_denied"),
            ClientsFull => (403, "http_request_denied"),
            ClientFlowsFull(_) | ClientMemoryFull => (503, "connection_limit_reached"),
            FlowsFull(_) => (503, "connection_limit_reached"),
            MonthUsedUp { .. } => (429, "http_request_denied"),
            DeadlineTooFar(_) => (403, "http_request_denied"),
            ClientPinnedFull(_) => (503, "http_request_denied"),
            StoreFull => (503, "http_request_denied"),
            StoreFailed => (500, "proxy_internal_error"),
            ObjectTooLarge { .. } => (502, "http_response_body_size"),
            UploadTooLarge { .. } => (413, "http_request_error"),
            UploadAwaited | Stopping => (503, "http_request_denied"),
            NoRelay => (403, "http_request_denied"),
            NoListener => (404, "destination_not_found"),
            RelaysFull(_) => (503, "connection_limit_reached"),
            RelayFailed(_) => (500, "proxy_internal_error"),
            NoPacketTunnels => (403, "http_request_denied"),
            TunnelAddressesFull => (503, "connection_limit_reached"),
            NoMailbox => (404, "destination_not_found"),
            MailboxesFull => (503, "connection_limit_reached"),
            LinkUnknown => (404, "destination_not_found"),
            LinkWithdrawn => (403, "http_request_denied"),
            FeedMissing {
                status: 404 | 410, ..
            } => (404, "destination_not_found"),
            FeedMissing { .. } | FeedUnreadable { .. } => (502, "http_protocol_error"),
            PortRefused(_) => (403, "http_request_denied"),
            AddressRefused { .. } => (403, "destination_ip_prohibited"),
            NameNotFound { .. } => (502, "dns_error"),
            NameTimeout(_) => (504, "dns_timeout"),
            ConnectRefused(_) => (502, "connection_refused"),
            Unroutable { .. } => (502, "destination_ip_unroutable"),
            ConnectTimeout { .. } => (504, "connection_timeout"),
            Certificate { .. } => (502, "tls_certificate_error"),
            Tls { .. } => (502, "tls_protocol_error"),
            ResponseTimeout { .. } => (504, "http_response_timeout"),
            OriginClosed { .. } | KeptConnClosed(_) => (502, "connection_terminated"),
            OriginProtocol { .. } => (502, "http_protocol_error"),
            OriginHeadTooLarge(_) => (502, "http_response_header_section_size"),
            UnexpectedPartial(_) => (502, "http_protocol_error"),
            TooManyRedirects(..) => (502, "http_protocol_error"),
            RedirectDowngrade(_) => (502, "http_request_denied"),
            RedirectUnusable(_) => (502, "http_protocol_error"),
            BodyLost(_) => (502, "http_response_incomplete"),
            NotCached => (504, "http_request_denied"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_would_let_an_address_through_is_named() {
        let refused = |address: &str, kind| {
            let address = address.parse().unwrap();
            let host = "h".to_owned();
            ProxRefusal::AddressRefused {
                host,
                address,
                kind,
            }
            .to_string()
        };
        let private = refused("10.0.0.1", SpecialAddress::Private);
        assert!(
            private.ends_with("--allow-net or --allow-private"),
            "{private}"
        );
        let metadata = refused("169.254.169.254", SpecialAddress::Metadata);
        assert!(
            metadata.ends_with("with --allow-net 169.254.169.254"),
            "{metadata}"
        );
    }
}
