//! An origin that does what a test tells it to, byte for byte, and remembers what it was asked.

#![allow(dead_code)] // each test file uses a part of it

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// One request, as it came in.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Its place among all requests, from 0.
    pub count: usize,
    pub path: String,
    pub headers: HashMap<String, String>,
}

impl Asked {
    /// The first byte of its range, if it has one.
    pub fn range_from(&self) -> Option<usize> {
        let range = self.headers.get("range")?.strip_prefix("bytes=")?;
        range.split_once('-')?.0.parse().ok()
    }

    /// The last byte of its range, if it has one.
    pub fn range_to(&self) -> Option<usize> {
        self.headers.get("range")?.rsplit_once('-')?.1.parse().ok()
    }
}

/// How an answer ends, after its bytes are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// An orderly close.
    Close,
    /// A TCP reset.
    Reset,
    /// Silence, with the connection open.
    Silence,
}

/// The bytes to answer with, head included, and what follows them.
pub struct Reply(pub Vec<u8>, pub End);

/// An origin on a port of its own.
pub struct Origin {
    pub address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Origin {
    /// Starts answering by `script`.
    pub async fn start(script: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Origin {
        Origin::start_at("127.0.0.1", script).await
    }

    /// Starts answering at an address of its own.
    pub async fn start_at(
        host: &str,
        script: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    ) -> Origin {
        let listener = TcpListener::bind((host, 0)).await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (seen, script) = (asked.clone(), Arc::new(script));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, seen.clone(), script.clone()));
            }
        });
        Origin { address, asked }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Everything asked so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("no panic").clone()
    }
}

async fn answer(
    stream: TcpStream,
    seen: Arc<Mutex<Vec<Asked>>>,
    script: Arc<impl Fn(&Asked) -> Reply>,
) -> Option<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).await.ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut headers = HashMap::new();
    loop {
        line.clear();
        stream.read_line(&mut line).await.ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let asked = {
        let mut seen = seen.lock().expect("no panic");
        let count = seen.len();
        seen.push(Asked {
            count,
            path,
            headers,
        });
        seen.last().expect("just added").clone()
    };
    let Reply(bytes, end) = script(&asked);
    stream.get_mut().write_all(&bytes).await.ok()?;
    match end {
        End::Close => {
            stream.get_mut().shutdown().await.ok()?;
            // Until the other side has closed too, or unread bytes would turn this into a reset.
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
        End::Reset => socket2::SockRef::from(stream.get_ref())
            .set_linger(Some(std::time::Duration::ZERO))
            .ok()?,
        End::Silence => {
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    }
    Some(())
}

/// A head and a body.
pub fn reply(status: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 {status}\r\n").into_bytes();
    for (name, value) in headers {
        bytes.extend(format!("{name}: {value}\r\n").into_bytes());
    }
    bytes.extend(b"\r\n");
    bytes.extend(body);
    bytes
}

/// A well-behaved answer for `object`: validator, ranges, If-Range.
pub fn proper(asked: &Asked, object: &[u8], etag: &str) -> Vec<u8> {
    let matches = asked.headers.get("if-range").is_none_or(|tag| tag == etag);
    match asked.range_from().filter(|_| matches) {
        Some(from) if from < object.len() => {
            let to = asked.range_to().unwrap_or(usize::MAX).min(object.len() - 1);
            let range = format!("bytes {from}-{to}/{}", object.len());
            let length = (to + 1 - from).to_string();
            let headers = [
                ("Content-Range", &*range),
                ("Content-Length", &*length),
                ("ETag", etag),
            ];
            reply("206 Partial Content", &headers, &object[from..=to])
        }
        Some(_) => {
            let range = format!("bytes */{}", object.len());
            let headers = [("Content-Range", &*range), ("Content-Length", "0")];
            reply("416 Range Not Satisfiable", &headers, b"")
        }
        None => {
            let length = object.len().to_string();
            reply(
                "200 OK",
                &[("Content-Length", &length), ("ETag", etag)],
                object,
            )
        }
    }
}

/// The same answer, cut off after `body_bytes` of its body.
pub fn cut(answer: Vec<u8>, body_bytes: usize) -> Vec<u8> {
    let head = answer
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .expect("a head")
        + 4;
    let end = (head + body_bytes).min(answer.len());
    answer[..end].to_vec()
}

/// Bytes that differ at every place and for every seed.
pub fn object(length: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(length)
    .collect()
}
