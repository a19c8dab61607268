//! Unmodified programs under `cedos run`, and behind the proxy of `cedos agent`.

mod limits;
mod local_proxy;
mod local_proxy_http2;
mod lookups;
mod programs;
mod words;
