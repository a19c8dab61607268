//! `cedos get`, `put`, `serve`, `url` and `play` as programs, against origins, proxies and networks that
//! misbehave.

mod detached;
mod download;
mod full_disk;
mod links;
mod mistakes;
mod modes;
mod nginx;
mod origins;
mod output;
mod plan;
mod portal;
mod prox;
mod put;
mod rest;
mod serve;
mod stream;
