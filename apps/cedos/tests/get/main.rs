//! `cedos get`, `put`, `serve`, `url` and `play` as programs, against origins, proxies and networks
//! with faults.

mod acme;
mod announced;
mod batch;
mod bridge;
mod detached;
mod download;
mod durable_proxy;
mod full_disk;
mod hostile_words;
mod links;
mod many_devices;
mod mistakes;
mod modes;
mod nginx;
mod nodes;
mod nodes_bucket;
mod origins;
mod output;
mod plan;
mod portal;
mod prox;
mod prox_bucket;
mod prox_feeds;
mod prox_restart;
mod put;
mod rest;
mod send_receive;
mod serve;
mod sleeping_tunnels;
mod stream;
mod sync;
mod sync_webdav;
mod udp_blocked;
mod upgrade;
