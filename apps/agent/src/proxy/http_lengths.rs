//! The number of bytes that a plain HTTP connection still has to carry, from the heads of its
//! messages: with a deadline, metered links then carry only what free ones cannot, as for a
//! download.
//!
//! ```text
//!  Head ── Content-Length: n ──▶ Body(n) ── n bytes passed ──▶ Head of the next message
//!    └── chunked, TLS, HEAD, an upgrade, anything else ──▶ Unknown, for the rest of the connection
//! ```
//!
//! Nothing is held back or changed; a length that is not believed costs what an unknown one costs.

/// The longest head that is read.
const HEAD_BYTES_MAX: usize = 16 * 1024; // what most servers accept
/// The most fields of a head.
const FIELDS_MAX: usize = 96; // a guess

/// The direction of messages on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HttpMessageKind {
    Request,
    Response,
}

/// What comes next in one direction.
#[derive(Debug)]
enum HttpMessageState {
    /// The head of a message, of which these bytes have passed.
    Head(Vec<u8>),
    /// A number of bytes of a body.
    Body(u64),
    /// Bytes whose number nothing tells.
    Unknown,
}

/// The messages of one direction.
#[derive(Debug)]
struct HttpMessageReader {
    kind: HttpMessageKind,
    state: HttpMessageState,
}

impl HttpMessageReader {
    fn new(kind: HttpMessageKind) -> HttpMessageReader {
        HttpMessageReader {
            kind,
            state: HttpMessageState::Head(Vec::new()),
        }
    }

    fn on_bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match &mut self.state {
                HttpMessageState::Unknown => return,
                HttpMessageState::Body(left) => {
                    let now = (*left).min(bytes.len() as u64);
                    *left -= now;
                    bytes = &bytes[now as usize..];
                    if *left == 0 {
                        self.state = HttpMessageState::Head(Vec::new());
                    }
                }
                HttpMessageState::Head(head) => {
                    let before = head.len();
                    let room = HEAD_BYTES_MAX - before;
                    head.extend_from_slice(&bytes[..bytes.len().min(room)]);
                    match body_after(self.kind, head) {
                        HeadEnd::Body { head_bytes, length } => {
                            bytes = &bytes[head_bytes - before..];
                            self.state = match length {
                                0 => HttpMessageState::Head(Vec::new()),
                                length => HttpMessageState::Body(length),
                            };
                        }
                        HeadEnd::More if head.len() < HEAD_BYTES_MAX => return,
                        HeadEnd::More | HeadEnd::Unknown => self.state = HttpMessageState::Unknown,
                    }
                }
            }
        }
    }

    /// Bytes of the current body that are still to come; none if nothing tells.
    fn left(&self) -> Option<u64> {
        match self.state {
            HttpMessageState::Head(_) => Some(0),
            HttpMessageState::Body(left) => Some(left),
            HttpMessageState::Unknown => None,
        }
    }
}

/// What the beginning of a message says of its body.
#[derive(Debug, PartialEq, Eq)]
enum HeadEnd {
    /// The head is not complete.
    More,
    /// The lengths of the head and of its body.
    Body { head_bytes: usize, length: u64 },
    /// This is not HTTP/1, or the length of the body is not in the head.
    Unknown,
}

fn body_after(kind: HttpMessageKind, head: &[u8]) -> HeadEnd {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let (head_bytes, fields, bodiless) = match kind {
        HttpMessageKind::Request => {
            let mut request = httparse::Request::new(&mut fields);
            match request.parse(head) {
                Ok(httparse::Status::Complete(end)) => {
                    // The length in the answer to HEAD is that of a body which does not come, and
                    // CONNECT begins another protocol.
                    if matches!(request.method, Some("HEAD" | "CONNECT")) {
                        return HeadEnd::Unknown;
                    }
                    (end, &*request.headers, true)
                }
                Ok(httparse::Status::Partial) => return HeadEnd::More,
                Err(_) => return HeadEnd::Unknown,
            }
        }
        HttpMessageKind::Response => {
            let mut response = httparse::Response::new(&mut fields);
            match response.parse(head) {
                Ok(httparse::Status::Complete(end)) => match response.code {
                    Some(100 | 102 | 103 | 204 | 304) => {
                        let (head_bytes, length) = (end, 0);
                        return HeadEnd::Body { head_bytes, length };
                    }
                    Some(200..) => (end, &*response.headers, false),
                    Some(_) | None => return HeadEnd::Unknown,
                },
                Ok(httparse::Status::Partial) => return HeadEnd::More,
                Err(_) => return HeadEnd::Unknown,
            }
        }
    };
    let field = |name: &str| {
        let mut fields = fields.iter();
        fields.find(|field| field.name.eq_ignore_ascii_case(name))
    };
    if field("transfer-encoding").is_some() {
        return HeadEnd::Unknown;
    }
    let length = match field("content-length") {
        Some(field) => std::str::from_utf8(field.value)
            .ok()
            .and_then(|text| text.trim().parse().ok()),
        None => bodiless.then_some(0),
    };
    match length {
        Some(length) => HeadEnd::Body { head_bytes, length },
        None => HeadEnd::Unknown,
    }
}

/// What the two directions of a connection still have to carry, as far as their HTTP heads tell.
#[derive(Debug)]
pub(super) struct HttpLengths {
    up: HttpMessageReader,
    down: HttpMessageReader,
}

impl Default for HttpLengths {
    fn default() -> HttpLengths {
        HttpLengths {
            up: HttpMessageReader::new(HttpMessageKind::Request),
            down: HttpMessageReader::new(HttpMessageKind::Response),
        }
    }
}

impl HttpLengths {
    /// Reads what the program sent.
    pub(super) fn on_sent(&mut self, bytes: &[u8]) {
        self.up.on_bytes(bytes);
    }

    /// Reads what the program received.
    pub(super) fn on_received(&mut self, bytes: &[u8]) {
        self.down.on_bytes(bytes);
    }

    /// Bytes of messages under way that are still to be carried; none if the connection carries
    /// something whose length nothing tells.
    pub(super) fn left(&self) -> Option<u64> {
        Some(self.up.left()? + self.down.left()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GET: &[u8] = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n";

    fn after(sent: &[&[u8]], received: &[&[u8]]) -> Option<u64> {
        let mut lengths = HttpLengths::default();
        sent.iter().for_each(|bytes| lengths.on_sent(bytes));
        received.iter().for_each(|bytes| lengths.on_received(bytes));
        lengths.left()
    }

    #[test]
    fn a_response_has_as_many_bytes_left_as_its_head_says_less_those_that_came() {
        let head = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n1234567890";
        assert_eq!(after(&[GET], &[]), Some(0));
        assert_eq!(after(&[GET], &[head]), Some(990));
        assert_eq!(after(&[GET], &[head, &[b'x'; 990]]), Some(0));
        // However the bytes are cut.
        let one_by_one: Vec<&[u8]> = head.chunks(1).collect();
        assert_eq!(after(&[GET], &one_by_one), Some(990));
    }

    #[test]
    fn an_upload_has_as_many_bytes_left_as_its_request_says() {
        let put = b"PUT /a HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n";
        assert_eq!(after(&[put, &[b'x'; 100]], &[]), Some(400));
        let go_on = b"HTTP/1.1 100 Continue\r\n\r\n";
        assert_eq!(after(&[put], &[go_on]), Some(500));
    }

    #[test]
    fn each_message_of_a_connection_counts_by_itself() {
        let first =
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 304 Not Modified\r\n\r\n";
        let next = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 70\r\n\r\n";
        assert_eq!(after(&[GET, GET, GET], &[first, next]), Some(70));
    }

    #[test]
    fn what_has_no_length_in_its_head_is_unknown_for_good() {
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let to_the_end = b"HTTP/1.1 200 OK\r\n\r\n";
        let length = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n";
        assert_eq!(after(&[GET], &[chunked]), None);
        assert_eq!(after(&[GET], &[to_the_end, length]), None);
        assert_eq!(after(&[b"\x16\x03\x01\x02\x00"], &[]), None, "TLS");
        let head = b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n";
        assert_eq!(after(&[head], &[length]), None);
        let upgrade = b"HTTP/1.1 101 Switching Protocols\r\n\r\n";
        assert_eq!(after(&[GET], &[upgrade]), None);
        let endless = vec![b'a'; HEAD_BYTES_MAX + 1];
        assert_eq!(after(&[GET], &[b"HTTP/1.1 200 OK\r\n", &endless]), None);
        let many = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n";
        assert_eq!(after(&[GET], &[many]), None);
    }
}
